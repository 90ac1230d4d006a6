#pragma once

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/optimizer/sharded_net.h"

/// Training of a UnitNet with sharded gradients and parameters.
namespace lockstep::testing {

using Weights = std::vector<at::Tensor>;

inline constexpr int kSteps = 6;
inline constexpr int64_t kTokensOfStep = 36;  // divisible by ranks and micro-batches
inline constexpr double kClip = 0.3;

struct ShardedRun {
  ShardingStrategy strategy = ShardingStrategy::optim;
  bool ahead = false;
  int64_t microbatches = 1;
  bool tied = false;
  bool frozen = false;
  bool counted = false;  ///< set_num_microbatches() instead of no_sync()
  std::optional<int64_t> bucket_size = {};
  double clip = kClip;

  DistributedDataParallelConfig ddp() const {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = strategy != ShardingStrategy::no_shard;
    config.data_parallel_sharding_strategy = strategy;
    config.overlap_param_gather = ahead;
    config.bucket_size = bucket_size;
    return config;
  }
  std::string text() const {
    return std::string(to_string(strategy)) + ", ahead " + std::to_string(ahead) +
           ", micro-batches " + std::to_string(microbatches) + ", tied " + std::to_string(tied) +
           ", frozen " + std::to_string(frozen) + ", counted " + std::to_string(counted);
  }
};

inline OptimizerConfig adamw(double clip) {
  OptimizerConfig config;
  config.lr = 0.01;
  config.weight_decay = 0.1;
  config.clip_grad = clip;
  return config;
}

/// A model in training on one rank.
class Training {
 public:
  Training(const ParallelState& state, const ShardedRun& run, at::ScalarType dtype = at::kDouble)
      : run_(run),
        net(run.tied, dtype, run.frozen),
        ddp(net, state, run.ddp()),
        optimizer(make_optimizer({&ddp}, adamw(run.clip))) {
    if (run.counted) ddp.set_num_microbatches(run.microbatches);
  }

  void backwards() {
    const ParallelState& state = ddp.parallel_state();
    ddp.zero_grad_buffer();
    const int64_t share = kTokensOfStep / state.world_size(), size = share / run_.microbatches;
    for (int64_t i = 0; i < run_.microbatches; ++i) {
      std::optional<DistributedDataParallel::NoSyncGuard> guard;
      if (!run_.counted && i + 1 < run_.microbatches) guard.emplace(ddp.no_sync());
      const int64_t first = step_ * kTokensOfStep + state.rank() * share + i * size;
      net.loss(first, size).backward();
    }
    ++step_;
  }
  void step() {
    backwards();
    const int64_t world = ddp.parallel_state().world_size();
    finalize_model_grads({&ddp}, at::full({}, kTokensOfStep / world, at::kLong));
    EXPECT_FALSE(optimizer->step().skipped);
  }
  Weights weights() {
    ddp.unshard();
    Weights list;
    for (const at::Tensor& param : net.parameters()) list.push_back(param.detach().clone());
    ddp.reshard();
    return list;
  }

 private:
  ShardedRun run_;
  int step_ = 0;

 public:
  UnitNet net;
  DistributedDataParallel ddp;
  std::unique_ptr<Optimizer> optimizer;
};

inline Weights train(const ParallelState& state, const ShardedRun& run,
                     at::ScalarType dtype = at::kDouble) {
  Training training(state, run, dtype);
  for (int step = 0; step < kSteps; ++step) training.step();
  return training.weights();
}

inline void expect_close(const Weights& found, const Weights& expected, double tolerance,
                         const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE((found[i].to(at::kDouble) - expected[i]).abs().max().item<double>(),
              tolerance * expected[i].abs().max().item<double>())
        << what << ", parameter " << i;
}

/// Whether the memory of a parameter's data exists.
inline bool is_readable(const at::Tensor& tensor) {
  try {
    (void)tensor.const_data_ptr();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

inline constexpr ShardingStrategy kLending[] = {ShardingStrategy::optim_grads,
                                                ShardingStrategy::optim_grads_params};

}  // namespace lockstep::testing
