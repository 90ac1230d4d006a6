#pragma once

#include "lockstep/core/config.h"

/// The requirements of gradient reduction and the kinds of optimizer on a configuration, and what
/// follows from its fields. Nothing here needs libtorch.
namespace lockstep {

/// ConfigError, naming the fields: a number out of its bounds, bucket_size together with
/// num_buckets, averages together with per-token scaling, what needs the distributed optimizer
/// without it, a gather of parameters that is aligned but not overlapped, a sharding strategy
/// together with what contradicts it. `ddp` may be one that is not resolved.
void check_ddp(const DistributedDataParallelConfig& ddp);

/// ConfigError, naming the fields, for a resolved configuration: moments in bf16 without moments or
/// with fp64 parameters, a lowest loss scale above the first one, gradients that are to be added in
/// fp32 over several replicas of the optimizer, an offloaded state with Muon or recorded steps,
/// sharded gradients together with these.
void check_optimizer(const Config& config);

/// Whether the loss scale is dynamic, so that it has a state that is worth keeping.
bool scale_adapts_itself(const Config& config);

/// What ddp.calculate_per_token_loss is, also where it is unset.
bool divides_by_labels(const DistributedDataParallelConfig& ddp);

}  // namespace lockstep
