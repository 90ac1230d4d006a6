#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/blend.h"
#include "lockstep/datasets/document_list.h"
#include "lockstep/datasets/index_cache.h"
#include "lockstep/datasets/text_dataset.h"

/// Which tokens sample k of a run is. That depends on the data, on model.seq_length and train.seed
/// alone, not on the layout, the batch size or the length of the run: whoever knows how many
/// samples were consumed can go on. Needs no libtorch.
namespace lockstep {

/// Samples by number. One object serves one thread.
class SampleSource {
 public:
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleSource() = default;

  /// How many there are.
  virtual int64_t size() const { return kEndless; }

  /// The tokens of sample `sample` (0 to size() - 1): inputs and, one token later, what they should
  /// predict, so out.size() is seq_length + 1. FileError names the file and the place of an id that
  /// is outside the vocabulary, and an index that does not fit the data.
  virtual void read(int64_t sample, std::span<int64_t> out) = 0;
};

/// Sample i is tokens i * seq_length ... of a text; a last partial window is dropped.
class WindowSource : public SampleSource {
 public:
  WindowSource(TokenSequence text, int64_t seq_length)
      : text_(std::move(text)), seq_length_(seq_length) {}

  int64_t size() const override { return evaluation_windows(text_.size(), seq_length_); }
  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  TokenSequence text_;
  int64_t seq_length_;
};

/// Windows of a text in the order of SampleOrder.
class TextSource : public SampleSource {
 public:
  /// ConfigError as of SampleOrder.
  TextSource(TokenSequence text, int64_t seq_length, uint64_t seed)
      : text_(std::move(text)), order_(text_.size(), seq_length, seed) {}

  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  TokenSequence text_;
  SampleOrder order_;
};

/// Where the indices of a DocumentSource are kept.
struct IndexCacheOptions {
  std::string folder;
  bool required = false;  ///< as of IndexCacheFile
};

/// Documents in Megatron Core's order. Each epoch is the one-epoch index of its GPTDataset
/// (build_sample_index() with num_samples = 0): the first with the low 32 bits of `seed`, the next
/// with that plus one, and so on. So a run within one epoch reads what Megatron reads; beyond it
/// Megatron's order would change with the length of the run, and a run that is prolonged would lose
/// samples and repeat others.
///
/// The indices of the first epoch, and of large later ones, are kept on disk.
class DocumentSource : public SampleSource {
 public:
  /// ConfigError if the documents have less than seq_length + 1 tokens.
  DocumentSource(DocumentList documents, int64_t seq_length, uint64_t seed,
                 IndexCacheOptions cache);

  void read(int64_t sample, std::span<int64_t> out) override;

  int64_t samples_per_epoch() const { return samples_per_epoch_; }

 private:
  void open_epoch(int64_t epoch);
  SampleIndex build(int64_t epoch) const;
  [[noreturn]] void fail_by_index(int64_t sample) const;

  DocumentList documents_;
  int64_t seq_length_;
  uint64_t seed_;
  IndexCacheOptions cache_;
  std::string description_;
  int64_t samples_per_epoch_;
  int64_t epoch_ = -1;
  SampleIndexView index_;
};

/// Samples of several sources, in Megatron Core's order of a blend.
class BlendedSource : public SampleSource {
 public:
  /// `weights`: of normalize_weights(), one for each source. There are samples until a source that
  /// is drawn from has no more.
  BlendedSource(std::vector<std::unique_ptr<SampleSource>> sources, std::vector<double> weights);

  int64_t size() const override { return size_; }
  void read(int64_t sample, std::span<int64_t> out) override;

 private:
  static constexpr int64_t kBlock = 1 << 16;  ///< samples that are drawn together

  void open_block(int64_t block);

  std::vector<std::unique_ptr<SampleSource>> sources_;
  std::vector<double> weights_;
  std::vector<std::vector<int64_t>> drawn_;  ///< in front of each block that was reached
  int64_t block_ = -1;
  std::vector<BlendedSample> samples_;  ///< of block_
  int64_t size_ = kEndless;
};

struct SampleSources {
  std::unique_ptr<SampleSource> training;    ///< endless
  std::unique_ptr<SampleSource> validation;  ///< windows from the front of the validation text
};

/// What `config.path` names. Data sets in Megatron's format are split by documents
/// (split_dataset()) and read in Megatron's order; several are blended where `config.blend` says
/// so, otherwise they are one set of documents. Where a text file is among the paths, all are one
/// text of random windows (read_text(), SampleOrder). Ids are below `vocabulary_size`. FileError
/// names a file that cannot be read, is empty or damaged; ConfigError names the field that cannot
/// be used.
SampleSources open_samples(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                           uint64_t seed);

}  // namespace lockstep
