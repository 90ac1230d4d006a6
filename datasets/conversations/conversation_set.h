#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// Conversations first ... last - 1 of a set.
struct ConversationRange {
  int64_t first = 0, last = 0;
  int64_t size() const { return last - first; }
};

/// Conversations from JSON lines as token ids, in memory: 5 bytes per token. Conversations without
/// a token to be learned are left out. Needs no libtorch.
class ConversationSet {
 public:
  struct Limits {
    int64_t vocabulary_size = 0;  ///< ids must be below it
    int64_t seq_length = 0;       ///< a longer conversation is cut there
  };

  /// Reads files that end in .jsonl, .jsonl.gz or .jsonl.zst; messages say that the field `field`
  /// names them. Blank lines are ignored. ConfigError: any other file name, or what
  /// ConversationEncoder refuses. FileError names the file and the line: what parse_conversation()
  /// refuses, an id outside the vocabulary, damage.
  ConversationSet(const std::vector<std::string>& paths, const std::string& field,
                  const DataConfig& config, const Limits& limits);

  int64_t size() const { return static_cast<int64_t>(begins_.size()) - 1; }
  /// The conversations of each path, in the order of the paths.
  const std::vector<ConversationRange>& files() const { return files_; }
  std::span<const uint32_t> ids(int64_t conversation) const;
  /// For each id 1 if it is to be learned, otherwise 0. The first never is: nothing comes before
  /// it.
  std::span<const uint8_t> learned(int64_t conversation) const;
  int64_t length(int64_t conversation) const {
    return begins_[static_cast<size_t>(conversation) + 1] -
           begins_[static_cast<size_t>(conversation)];
  }

  int64_t num_cut() const { return cut_; }      ///< longer than seq_length
  int64_t num_empty() const { return empty_; }  ///< left out
  int64_t num_tokens(const ConversationRange& range) const {
    return begins_[static_cast<size_t>(range.last)] - begins_[static_cast<size_t>(range.first)];
  }
  int64_t num_learned(const ConversationRange& range) const;

 private:
  class Reader;

  std::vector<uint32_t> ids_;
  std::vector<uint8_t> learned_;
  std::vector<int64_t> begins_ = {0};
  std::vector<ConversationRange> files_;
  int64_t cut_ = 0, empty_ = 0;
};

}  // namespace lockstep
