#include "lockstep/distributed/shard_ranges.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

int64_t shard_numel(const ParamLayout::Bucket& bucket, int64_t num_shards) {
  const int64_t numel = bucket.end - bucket.start;
  require<UsageError>(num_shards >= 1, "num_shards: found {}, allowed: >= 1", num_shards);
  require<UsageError>(numel % num_shards == 0,
                      "bucket of {} elements: it does not split into {} equal shards; allowed: "
                      "layouts for the distributed optimizer and as many ranks",
                      numel, num_shards);
  return numel / num_shards;
}

void check_rank(int64_t num_shards, int64_t rank) {
  require<UsageError>(rank >= 0 && rank < num_shards, "rank: found {}, allowed: 0 to {}", rank,
                      num_shards - 1);
}

ElementRange relative_to(int64_t origin, const ElementRange& range) {
  return {range.start - origin, range.end - origin};
}

/// One bucket, cut into shards.
class CutBucket {
 public:
  CutBucket(const ParamLayout& layout, size_t bucket, int64_t num_shards)
      : layout_(layout),
        index_(static_cast<int64_t>(bucket)),
        start_(layout.buckets[bucket].start),
        shard_numel_(shard_numel(layout.buckets[bucket], num_shards)) {}

  /// The ranks that own a part of `param`.
  ElementRange owners(int64_t param) const {
    const ParamLayout::Slot& slot = layout_.slots[static_cast<size_t>(param)];
    if (slot.start == slot.end) return {};
    return {(slot.start - start_) / shard_numel_, (slot.end - 1 - start_) / shard_numel_ + 1};
  }

  ParamShard part(int64_t param, int64_t rank) const {
    const ParamLayout::Slot& slot = layout_.slots[static_cast<size_t>(param)];
    const int64_t shard_start = start_ + rank * shard_numel_;
    const ElementRange part = {std::max(slot.start, shard_start),
                               std::min(slot.end, shard_start + shard_numel_)};
    return {.bucket = index_,
            .rank = rank,
            .param = param,
            .in_buffer = part,
            .in_bucket = relative_to(start_, part),
            .in_shard = relative_to(shard_start, part),
            .in_param = relative_to(slot.start, part)};
  }

 private:
  const ParamLayout& layout_;
  int64_t index_;
  int64_t start_;
  int64_t shard_numel_;
};

}  // namespace

ElementRange shard_of_bucket(const ParamLayout::Bucket& bucket, int64_t num_shards, int64_t rank) {
  const int64_t numel = shard_numel(bucket, num_shards);
  check_rank(num_shards, rank);
  return {bucket.start + rank * numel, bucket.start + (rank + 1) * numel};
}

std::vector<ParamShard> shards_of_rank(const ParamLayout& layout, int64_t num_shards,
                                       int64_t rank) {
  check_rank(num_shards, rank);
  std::vector<ParamShard> shards;
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const CutBucket bucket(layout, b, num_shards);
    for (const int64_t param : layout.buckets[b].params) {
      const ElementRange owners = bucket.owners(param);
      if (rank >= owners.start && rank < owners.end) shards.push_back(bucket.part(param, rank));
    }
  }
  return shards;
}

void visit_shards(const ParamLayout& layout, int64_t num_shards,
                  const std::function<void(const ParamShard&)>& visit) {
  for (const auto& bucket : layout.buckets) shard_numel(bucket, num_shards);
  for (size_t b = 0; b < layout.buckets.size(); ++b) {
    const CutBucket bucket(layout, b, num_shards);
    for (const int64_t param : layout.buckets[b].params) {
      const ElementRange owners = bucket.owners(param);
      for (int64_t rank = owners.start; rank < owners.end; ++rank) visit(bucket.part(param, rank));
    }
  }
}

}  // namespace lockstep
