#pragma once

#include <memory>

#include "lockstep/datasets/conversation_set.h"
#include "lockstep/datasets/packing.h"
#include "lockstep/datasets/sample_source.h"

namespace lockstep {

/// Conversations, packed best-fit into samples of seq_length tokens. Each conversation is a
/// document: attention does not cross its bounds, its positions begin at 0, and only the tokens to
/// be learned have loss. The rest of a sample is filled with id 0, as a last document without loss.
class ConversationSource : public SampleSource {
 public:
  /// The conversations of the set in `ranges`; there may be none unless `endless`. With `endless`
  /// each epoch packs them again, in an order that depends only on (seed, epoch), into the same
  /// number of samples. Otherwise there is one epoch, in a random order that is the same for every
  /// seed: the packing begins with the longest conversations, and the first samples of an
  /// evaluation must stand for all of them.
  ConversationSource(std::shared_ptr<const ConversationSet> set,
                     const std::vector<ConversationRange>& ranges, int64_t seq_length,
                     uint64_t seed, bool endless);

  int64_t size() const override { return endless_ ? kEndless : samples_per_epoch_; }
  void read(int64_t sample, std::span<int64_t> out) override;
  SampleMarks marks(int64_t sample, std::span<const int64_t> ids) override;

  int64_t samples_per_epoch() const { return samples_per_epoch_; }

 private:
  /// The conversations of a sample, by their numbers in the set.
  std::vector<int64_t> conversations_of(int64_t sample);
  void open_epoch(int64_t epoch);

  std::shared_ptr<const ConversationSet> set_;
  std::vector<int64_t> numbers_;  ///< of the source's conversations, in the set
  std::vector<int64_t> lengths_;  ///< of the same
  int64_t seq_length_;
  uint64_t seed_;
  bool endless_;
  int64_t samples_per_epoch_ = 0;
  int64_t epoch_ = -1;
  Packing packing_;  ///< of epoch_
};

/// The sources in `config.path`, with train.task = sft: files of JSON lines with conversations. The
/// first share of `config.split` trains and the next validates, in each file apart; with
/// `config.valid_path` all of its conversations validate instead. Errors as for ConversationSet;
/// ConfigError also if no conversation is left to train on.
SampleSources open_conversations(const DataConfig& config, int64_t vocabulary_size,
                                 int64_t seq_length, uint64_t seed);

}  // namespace lockstep
