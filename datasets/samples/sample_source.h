#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

/// The tokens of sample k of a run. They depend only on the data, model.seq_length and train.seed,
/// not on the layout, the batch size or the length of the run: to resume, it is enough to know how
/// many samples were consumed. Needs no libtorch.
namespace lockstep {

/// Additional data for the seq_length tokens of a sample that a model reads.
struct SampleMarks {
  /// Lengths of the documents that bound attention; they add up to seq_length. Empty: nothing
  /// bounds it.
  std::vector<int64_t> documents = {};
  /// The positions of the tokens. Empty: 0, 1, ...
  std::vector<int64_t> positions = {};
  /// For each token, whether what follows it is to be predicted, 1 or 0. Empty: everything is.
  std::vector<uint8_t> loss = {};
  /// Number of tokens at the end that only pad the sample.
  int64_t padding = 0;

  bool operator==(const SampleMarks&) const = default;
};

/// Samples by number. One object serves one thread.
class SampleSource {
 public:
  static constexpr int64_t kEndless = std::numeric_limits<int64_t>::max();

  virtual ~SampleSource() = default;

  /// Number of samples.
  virtual int64_t size() const { return kEndless; }

  /// The tokens of sample `sample` (0 to size() - 1): inputs and, one token later, what they should
  /// predict, so out.size() is seq_length + 1. FileError names the file and the place of an id that
  /// is outside the vocabulary, and an index that does not fit the data.
  virtual void read(int64_t sample, std::span<int64_t> out) = 0;

  /// The marks of the sample; `ids` are what read() returned.
  virtual SampleMarks marks(int64_t sample, std::span<const int64_t> ids);
};

struct SampleSources {
  std::unique_ptr<SampleSource> training;    ///< endless
  std::unique_ptr<SampleSource> validation;  ///< windows from the beginning of the validation text
  std::unique_ptr<SampleSource> test;        ///< the same for the test text; null if none is named
  std::vector<std::string> notes = {};       ///< what to tell the user about the data
  /// Which part of a blend leaves validation without a sample; empty if none does.
  std::string empty_validation = {};
  /// The first text file without the end of a document, where marks_documents(); empty if there is
  /// none.
  std::string endless_text = {};
};

/// Opens what `config.path` names. Data sets in Megatron's format are split by documents
/// (split_dataset()) and read in Megatron's order; several are blended if `config.blend` says so
/// (BlendedSource), otherwise they are one set of documents, whose samples cross from one data set
/// to the next. If a text file is among the paths, all of them form one
/// text that is read in random windows (read_text(), SampleOrder). If `config.valid_path` is set,
/// `path` is only for training and validation reads all of `valid_path`; likewise the test reads
/// all of `test_path`. With `config.mock` no file is read (MockSource). Documents in samples are
/// marked as with_document_marks() says. Ids must be below `vocabulary_size`. FileError
/// names a file that cannot be read, is empty or damaged; ConfigError names the field that cannot
/// be used.
SampleSources open_samples(const DataConfig& config, int64_t vocabulary_size, int64_t seq_length,
                           uint64_t seed);

}  // namespace lockstep
