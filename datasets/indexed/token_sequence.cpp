#include "lockstep/datasets/token_sequence.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {

void TokenSequence::append(std::shared_ptr<const void> owner, const PackedTokens& tokens,
                           std::string path, int64_t first) {
  require<UsageError>(is_integer(tokens.type), "'{}': found numbers of {}, allowed: integers", path,
                      token_type_name(tokens.type));
  if (tokens.size == 0) return;
  parts_.push_back({std::move(owner), tokens, std::move(path), first, size_});
  size_ += tokens.size;
}

void TokenSequence::check_ids(const Part& part, int64_t at, std::span<const int64_t> ids) const {
  const auto bad = std::find_if(ids.begin(), ids.end(),
                                [&](int64_t id) { return id < 0 || id >= vocabulary_size_; });
  if (bad == ids.end()) return;
  fail<FileError>("'{}': token {}: found id {}, allowed: 0 to {}{}", part.path,
                  part.first + at + (bad - ids.begin()), *bad, vocabulary_size_ - 1,
                  vocabulary_field_.empty() ? "" : " (" + vocabulary_field_ + ")");
}

void TokenSequence::read(int64_t start, std::span<int64_t> out) const {
  const auto count = static_cast<int64_t>(out.size());
  require<UsageError>(start >= 0 && count <= size_ && start <= size_ - count,
                      "TokenSequence: found {} tokens at {}, allowed: inside the {}", count, start,
                      size_);
  auto part = std::upper_bound(parts_.begin(), parts_.end(), start,
                               [](int64_t place, const Part& p) { return place < p.begin; });
  if (part != parts_.begin()) --part;
  while (!out.empty()) {
    const int64_t at = start - part->begin;
    const int64_t here = std::min(part->tokens.size - at, static_cast<int64_t>(out.size()));
    const auto ids = out.first(static_cast<size_t>(here));
    part->tokens.read(at, ids);
    check_ids(*part, at, ids);
    out = out.subspan(static_cast<size_t>(here));
    start += here;
    ++part;
  }
}

}  // namespace lockstep
