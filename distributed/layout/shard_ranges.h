#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "lockstep/distributed/param_layout.h"

/// Which elements of which parameter each data-parallel rank owns under the distributed optimizer.
/// Every bucket of a buffer is cut into equal shards, one per rank in the order of the ranks,
/// wherever parameters begin and end. Pure functions; all numbers count elements.
namespace lockstep {

/// start <= i < end
struct ElementRange {
  int64_t start = 0;
  int64_t end = 0;

  int64_t numel() const { return end - start; }
  bool operator==(const ElementRange&) const = default;
};

/// The part of one parameter that is in one rank's shard of one bucket: the same elements, at least
/// one, in four coordinate systems. In brackets are the names of Megatron Core's
/// DistributedOptimizer.
struct ParamShard {
  int64_t bucket = 0;
  int64_t rank = 0;             ///< of the ranks among which buckets are cut
  int64_t param = 0;            ///< index of registration
  ElementRange in_buffer = {};  ///< [gbuf_world]
  ElementRange in_bucket = {};  ///< from the start of the bucket [gbuf_world_in_bucket]
  ElementRange in_shard = {};   ///< from the start of the rank's shard of the bucket [gbuf_local]
  ElementRange in_param = {};   ///< of the flattened parameter [param]

  bool operator==(const ParamShard&) const = default;
};

/// What `rank` of `num_shards` owns of `bucket`, padding included, in coordinates of the buffer.
/// UsageError: the bucket does not split into `num_shards` equal shards, or there is no such rank.
ElementRange shard_of_bucket(const ParamLayout::Bucket& bucket, int64_t num_shards, int64_t rank);

/// What `rank` of `num_shards` owns: bucket by bucket, and in a bucket in the order of the buffer.
/// Every element of every parameter is in exactly one rank's list. `layout` is one that was made
/// for the distributed optimizer and `num_shards` data-parallel ranks, otherwise UsageError.
std::vector<ParamShard> shards_of_rank(const ParamLayout& layout, int64_t num_shards, int64_t rank);

/// Gives `visit` what every rank owns: bucket by bucket, in a bucket rank by rank, and for each
/// rank in the order of the buffer. Errors as in shards_of_rank(), before the first visit.
void visit_shards(const ParamLayout& layout, int64_t num_shards,
                  const std::function<void(const ParamShard&)>& visit);

}  // namespace lockstep
