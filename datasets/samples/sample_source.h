#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

/// Which tokens sample k of a run is. That depends on the data, on model.seq_length and train.seed
/// alone, not on the layout, the batch size or the length of the run: whoever knows how many
/// samples were consumed can go on. Needs no libtorch.
namespace lockstep {

/// What stands beside the seq_length tokens of a sample that a model reads.
struct SampleMarks {
  /// Lengths of the documents behind which attention ends; they add up to seq_length. Empty: it
  /// does not end.
  std::vector<int64_t> documents = {};
  /// The positions of the tokens. Empty: 0, 1, ...
  std::vector<int64_t> positions = {};
  /// Whether what follows each token is to be predicted, 1 or 0. Empty: all is.
  std::vector<uint8_t> loss = {};
  /// Number of tokens at the end that only fill the sample up.
  int64_t padding = 0;

  bool operator==(const SampleMarks&) const = default;
};

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

  /// What stands beside it; `ids` are what read() gave.
  virtual SampleMarks marks(int64_t sample, std::span<const int64_t> ids);
};

struct SampleSources {
  std::unique_ptr<SampleSource> training;    ///< endless
  std::unique_ptr<SampleSource> validation;  ///< windows from the front of the validation text
  std::unique_ptr<SampleSource> test;   ///< the same of the test text; null where none is named
  std::vector<std::string> notes = {};  ///< what is to be told of the data
};

/// What `config.path` names. Data sets in Megatron's format are split by documents
/// (split_dataset()) and read in Megatron's order; several are blended where `config.blend` says
/// so, otherwise they are one set of documents. Where a text file is among the paths, all are one
/// text of random windows (read_text(), SampleOrder). Where `config.valid_path` is set, `path` is
/// for training alone and validation reads all of `valid_path`; so does the test with `test_path`.
/// With `config.mock` no file is read (MockSource). Documents in samples are marked as
/// with_document_marks() says. Ids are below `vocabulary_size`. FileError
/// names a file that cannot be read, is empty or damaged; ConfigError names the field that cannot
/// be used.
SampleSources open_samples(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                           uint64_t seed);

}  // namespace lockstep
