#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lockstep/datasets/token_type.h"

namespace lockstep {

/// Token ids from several places, one after another. They stay where they are (in a file, say) and
/// are read on demand. Needs no libtorch.
class TokenSequence {
 public:
  /// Ids must be below `vocabulary_size`, which the field `vocabulary_field` sets.
  explicit TokenSequence(int64_t vocabulary_size = std::numeric_limits<int64_t>::max(),
                         std::string vocabulary_field = "")
      : vocabulary_size_(vocabulary_size), vocabulary_field_(std::move(vocabulary_field)) {}

  /// Adds `tokens`, which are in the file `path`, starting with its token `first`. `owner` keeps
  /// the memory alive or the file open. UsageError unless they are integers.
  void append(std::shared_ptr<const void> owner, const PackedTokens& tokens, std::string path,
              int64_t first);

  int64_t size() const { return size_; }

  /// Tokens start ... start + out.size() - 1. UsageError unless all of them exist; FileError names
  /// the file and the place of an id that is outside the vocabulary, or that cannot be read.
  void read(int64_t start, std::span<int64_t> out) const;

 private:
  struct Part {
    std::shared_ptr<const void> owner;
    PackedTokens tokens;
    std::string path;
    int64_t first = 0;  ///< of its file
    int64_t begin = 0;  ///< in the sequence
  };

  void check_ids(const Part& part, int64_t at, std::span<const int64_t> ids) const;

  int64_t vocabulary_size_;
  std::string vocabulary_field_;
  std::vector<Part> parts_;
  int64_t size_ = 0;
};

}  // namespace lockstep
