#pragma once

#include <optional>
#include <string>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"

/// Training a SmallNet on several ranks, in any setting of the wrapper.
namespace lockstep::testing {

inline constexpr int kLayers = 5, kSteps = 20;
inline constexpr int64_t kSamples = 120;  // of a step: divisible by ranks * micro-batches
inline constexpr double kClip = 0.3, kDecay = 0.1, kRate = 0.01;

/// Everything that must not change what is learnt.
struct Setting {
  int64_t ranks = 1;
  int64_t instances = 1;
  int64_t microbatches = 1;
  bool distributed = true;
  bool overlap_reduce = true;
  bool overlap_gather = false;
  std::optional<int64_t> bucket_size = {};

  DistributedDataParallelConfig ddp() const {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = distributed;
    config.overlap_grad_reduce = overlap_reduce;
    config.overlap_param_gather = overlap_gather;
    config.bucket_size = bucket_size;
    return config;
  }
  RankThreadOptions threads() const {
    RankThreadOptions options;
    options.sizes.optimizer_instances = instances;
    return options;
  }
  std::string text() const {
    return std::to_string(ranks) + " ranks, " + std::to_string(instances) + " instances, " +
           std::to_string(microbatches) + " micro-batches, distributed " +
           std::to_string(distributed) + ", overlap " + std::to_string(overlap_reduce) +
           std::to_string(overlap_gather) + ", bucket " + std::to_string(bucket_size.value_or(0));
  }
};

inline OptimizerConfig adamw_config(double clip = kClip) {
  OptimizerConfig config;
  config.lr = kRate;
  config.adam_beta2 = 0.95;
  config.weight_decay = kDecay;
  config.clip_grad = clip;
  return config;
}

/// All micro-batches of step `step` of this rank.
inline void run_backwards(const SmallNet& net, DistributedDataParallel& ddp, int step,
                          int64_t microbatches, at::ScalarType dtype) {
  const ParallelState& state = ddp.parallel_state();
  const int64_t share = kSamples / state.world_size(), size = share / microbatches;
  for (int64_t i = 0; i < microbatches; ++i) {
    std::optional<DistributedDataParallel::NoSyncGuard> guard;
    if (i + 1 < microbatches) guard.emplace(ddp.no_sync());
    net.loss(SmallNet::samples(step * kSamples + state.rank() * share + i * size, size, dtype))
        .backward();
  }
}

inline void reduce_gradients(DistributedDataParallel& ddp) {
  const int64_t world = ddp.parallel_state().world_size();
  if (ddp.scaling_mode() == GradientScalingMode::per_token)
    finalize_model_grads({&ddp}, at::full({}, kSamples / world, at::kLong));
  else
    finalize_model_grads({&ddp});
}

}  // namespace lockstep::testing
