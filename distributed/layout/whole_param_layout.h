#pragma once

// Internal.

#include "lockstep/distributed/param_layout.h"

namespace lockstep {

/// The number that a shard of a bucket of whole parameters is a multiple of: lcm(64, D /
/// data_parallel_size), where a bucket of other parameters ends at multiples of D (see
/// pad_bucket_end()).
int64_t whole_param_shard_divisor(int64_t data_parallel_size, bool high_bus_bandwidth);

/// The layout of a buffer for the distributed optimizer in which no parameter is cut: each is
/// stored whole in the shard of one data-parallel rank, because its update needs all of it (Muon).
/// Megatron Core calls it layer-wise. Parameters are collected in reverse order of registration
/// until there are bucket_size elements, and at least 0.9 times what the ranks hold if each has one
/// of the largest. Collection continues as long as the next parameter fits without longer shards,
/// if each parameter goes to the emptiest shard. Then the parameters are assigned again, the most
/// costly first, each to the rank that has the least work so far in the whole buffer and whose
/// shard stays within 1.3 times the mean. The work of a [rows, columns] matrix is max * min^2, of
/// another parameter its number of elements. A tied embedding has a bucket of its own and is in the
/// first shard.
///
/// `options` are those of the distributed optimizer. Errors as in compute_param_layout().
ParamLayout compute_whole_param_layout(const std::vector<LayoutParam>& params,
                                       const LayoutOptions& options);

}  // namespace lockstep
