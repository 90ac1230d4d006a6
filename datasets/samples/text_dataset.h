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
};

/// Opens what `config.path` names and cuts each by `config.split`: its first share of the tokens is
/// training text, the next validation text. The parts of several paths follow each other. A path is
/// the prefix of a data set in Megatron's format if PREFIX.idx and PREFIX.bin are there; its
/// documents are taken as one text. Otherwise it is a text file, which `config.tokenizer` turns
/// into ids. Ids must be below `vocabulary_size`, which reading them checks. FileError names a file
/// that cannot be read, is empty or damaged; ConfigError if no path is given, or one of JSON lines.
/// In messages the paths come from `field`.
TextSplit read_text(const DataConfig& config,
                    int64_t vocabulary_size = std::numeric_limits<int64_t>::max(),
                    const std::string& field = "data.path");

/// Which part of a text each training sample is. An epoch takes non-overlapping windows of
/// `seq_length` tokens in a random order, from a random start, so that later epochs see other cuts.
/// Both depend on (seed, epoch) alone: sample k is the same for every layout, batch size and
/// restart.
class SampleOrder {
 public:
  /// ConfigError if the text has less than seq_length + 1 tokens.
  SampleOrder(int64_t num_tokens, int64_t seq_length, uint64_t seed);

  /// First token of sample `sample` (>= 0); the sample reads the seq_length tokens from there and
  /// predicts those one later.
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
/// predicts the next of each; a last partial window is dropped.
int64_t evaluation_windows(int64_t num_tokens, int64_t seq_length);

}  // namespace lockstep
