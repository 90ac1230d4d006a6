#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "lockstep/core/config.h"
#include "lockstep/datasets/token_sequence.h"

namespace lockstep {

/// The training and the validation text, as token ids.
struct TextSplit {
  TokenSequence training;
  TokenSequence validation;
  /// The first text file without an id that ends a document, where marks_documents(); empty if
  /// there is none.
  std::string endless = {};
};

/// Opens the paths in `config.path` and cuts each according to `config.split`: the first share of
/// its tokens is training text, the next is validation text. The parts of several paths follow each
/// other. A path is the prefix of a data set in Megatron's format if PREFIX.idx and PREFIX.bin
/// exist; its documents are treated as one text. Otherwise it is a text file, decompressed if its
/// name ends in .gz or .zst, which `config.tokenizer` turns into ids. Ids must be below
/// `vocabulary_size`; this is checked when they are read. FileError names a file that cannot be
/// read, is empty or damaged; ConfigError if no path is given, or one with JSON lines. Messages say
/// that the paths come from `field`.
TextSplit read_text(const DataConfig& config,
                    int64_t vocabulary_size = std::numeric_limits<int64_t>::max(),
                    const std::string& field = "data.path");

/// Which part of a text each training sample is. An epoch takes non-overlapping windows of
/// `seq_length` tokens in a random order, from a random start, so that later epochs see different
/// cuts. Both depend only on (seed, epoch): sample k is the same for every layout, batch size and
/// restart.
class SampleOrder {
 public:
  /// ConfigError if the text has fewer than seq_length + 1 tokens.
  SampleOrder(int64_t num_tokens, int64_t seq_length, uint64_t seed);

  /// First token of sample `sample` (>= 0); the sample reads seq_length tokens from there and
  /// predicts, for each, the next one.
  int64_t start_of(int64_t sample) const;

  /// Samples of one epoch.
  int64_t samples_per_epoch() const { return windows_; }

 private:
  int64_t seq_length_;
  uint64_t seed_;
  int64_t windows_;
  int64_t shifts_;  ///< number of possible starts of an epoch
};

/// Number of windows of a text for evaluation: window i reads tokens i * seq_length ... and
/// predicts, for each, the next one; a last partial window is dropped.
int64_t evaluation_windows(int64_t num_tokens, int64_t seq_length);

}  // namespace lockstep
