#pragma once

#include <array>
#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "lockstep/datasets/dataset_index.h"

/// The order in which Megatron Core's GPTDataset reads documents, number for number. Needs no
/// libtorch. "Document" is used as in Megatron: a sequence of the `.idx`.
namespace lockstep {

/// NumPy's legacy generator and its shuffle: numpy.random.RandomState(seed).shuffle(values).
class NumpyShuffle {
 public:
  explicit NumpyShuffle(uint32_t seed) : generator_(seed) {}

  /// UsageError for more than 2^32 values, for which NumPy draws different numbers.
  template <class T>
  void operator()(std::span<T> values) {
    check_size(values.size());
    for (size_t i = values.size(); i-- > 1;) std::swap(values[i], values[draw(i)]);
  }

 private:
  static void check_size(size_t size);
  /// A uniform integer from 0 to `last`.
  size_t draw(size_t last);

  std::mt19937 generator_;
};

/// Documents begin ... end - 1.
struct DocumentRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// How a split into up to three shares (training, validation, test) distributes documents, as
/// Megatron's builder does. UsageError unless the shares are >= 0 and sum to one, apart from
/// rounding: see parse_split().
std::array<DocumentRange, 3> split_documents(std::span<const double> shares, int64_t documents);

struct SampleIndexOptions {
  int64_t seq_length = 0;  ///< tokens, > 0
  uint32_t seed = 0;
  /// How many samples are needed, which determines the number of epochs; 0: one epoch.
  int64_t num_samples = 0;
  /// A sample has this many more tokens than seq_length, 0 or 1, for the labels; the next sample
  /// begins with them again.
  int64_t extra_tokens = 1;
  /// Whether tokens at the end that do not fill a sample are dropped.
  bool drop_last_partial = true;
};

/// Where sample k begins: at token `offset` of document documents[document].
struct SampleStart {
  int64_t document = 0;
  int64_t offset = 0;
  bool operator==(const SampleStart&) const = default;
};

/// The starts of all samples, and one more: walks through `documents`, whose lengths are in
/// `lengths`, by document, in samples of seq_length tokens. Sample k reads from starts[k] to
/// starts[k + 1], and extra_tokens more. Without drop_last_partial the number of samples is rounded
/// up in single precision, as in Megatron. UsageError if the documents are not enough for one
/// sample.
std::vector<SampleStart> build_sample_starts(const PackedArray<int32_t>& lengths,
                                             std::span<const int32_t> documents,
                                             const SampleIndexOptions& options);

/// Megatron's three indices of one split.
struct SampleIndex {
  int64_t epochs = 0;
  std::vector<int32_t> documents;   ///< in reading order, over all epochs
  std::vector<SampleStart> starts;  ///< of the samples, in the order of their tokens
  std::vector<int64_t> order;       ///< sample k of the training is number order[k] of these

  int64_t num_samples() const { return static_cast<int64_t>(order.size()); }
};

/// The indices of documents range.begin ... range.end - 1. If less than 80 % of the last epoch is
/// needed, it is shuffled separately, after the others. UsageError if there are no tokens, or not
/// enough for one sample.
SampleIndex build_sample_index(const PackedArray<int32_t>& lengths, DocumentRange range,
                               const SampleIndexOptions& options);

}  // namespace lockstep
