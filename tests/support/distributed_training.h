#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"

/// Trains a SmallNet on several ranks, with any settings of the wrapper.
namespace lockstep::testing {

inline constexpr int kLayers = 5, kSteps = 20;
inline constexpr int64_t kSamples = 120;  // per step: divisible by the number of ranks
inline constexpr double kClip = 0.3, kDecay = 0.1, kRate = 0.01;

/// Settings that must not change what is learnt.
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

/// Runs the backwards of this rank's micro-batches in step `step`; the last one may be larger.
inline void run_backwards(const SmallNet& net, DistributedDataParallel& ddp, int step,
                          int64_t microbatches, at::ScalarType dtype) {
  const ParallelState& state = ddp.parallel_state();
  const int64_t share = kSamples / state.world_size(), size = share / microbatches;
  for (int64_t i = 0; i < microbatches; ++i) {
    std::optional<DistributedDataParallel::NoSyncGuard> guard;
    if (i + 1 < microbatches) guard.emplace(ddp.no_sync());
    const int64_t first = step * kSamples + state.rank() * share + i * size;
    const int64_t count = i + 1 < microbatches ? size : share - i * size;
    net.loss(SmallNet::samples(first, count, dtype)).backward();
  }
}

inline void reduce_gradients(DistributedDataParallel& ddp) {
  const int64_t world = ddp.parallel_state().world_size();
  if (ddp.scaling_mode() == GradientScalingMode::per_token)
    finalize_model_grads({&ddp}, at::full({}, kSamples / world, at::kLong));
  else
    finalize_model_grads({&ddp});
}

using Weights = std::vector<at::Tensor>;

inline Weights weights_of(const SmallNet& net) {
  Weights result;
  for (const at::Tensor& param : net.parameters()) result.push_back(param.detach().clone());
  return result;
}

/// Trains a SmallNet for kSteps steps and returns its weights. Uses `rule` unless it is null.
inline Weights train(const ParallelState& state, const Setting& setting,
                     const OptimizerConfig& config, at::ScalarType dtype,
                     const std::function<bool(const NamedParameter&)>& is_matrix = {},
                     const std::vector<ParamOverride>& overrides = {},
                     const std::shared_ptr<const UpdateRule>& rule = nullptr) {
  SmallNet net(kLayers, dtype);
  const auto params = with_matrices(
      net, [&](const NamedParameter& param) { return is_matrix && is_matrix(param); });
  DistributedDataParallel ddp(params, state, setting.ddp(), /*disable_bucketing=*/false,
                              is_matrix ? MatrixLayout::whole : MatrixLayout::cut);
  const auto optimizer = make_optimizer({&ddp}, config, overrides, rule);
  for (int step = 0; step < kSteps; ++step) {
    ddp.zero_grad_buffer();
    run_backwards(net, ddp, step, setting.microbatches, dtype);
    reduce_gradients(ddp);
    EXPECT_FALSE(optimizer->step().skipped);
  }
  ddp.finish_param_sync();
  return weights_of(net);
}

/// The same in one process, with plain libtorch and in double: clips with libtorch, then calls
/// `update`.
inline Weights train_plainly(const SmallNet& net, const std::function<void()>& update) {
  for (int step = 0; step < kSteps; ++step) {
    for (const at::Tensor& param : net.parameters())
      if (param.grad().defined()) param.mutable_grad().reset();
    (net.loss(SmallNet::samples(step * kSamples, kSamples)) / kSamples).backward();
    torch::nn::utils::clip_grad_norm_(net.parameters(), kClip);
    update();
  }
  return weights_of(net);
}

/// Rates of one parameter.
struct Rates {
  double learning_rate, weight_decay;
};

/// Uses libtorch's own optimizer. Without `rates_of`, only matrices have weight decay.
inline Weights train_plainly(const OptimizerConfig& config,
                             const std::function<Rates(const std::string& name)>& rates_of = {}) {
  const SmallNet net(kLayers);
  std::vector<torch::optim::OptimizerParamGroup> adamw, sgd;
  for (const auto& item : net.named_parameters()) {
    const Weights params = {item.value()};
    const auto [rate, decay] =
        rates_of ? rates_of(item.key())
                 : Rates{config.lr, item.value().dim() > 1 ? config.weight_decay : 0};
    adamw.emplace_back(params, std::make_unique<torch::optim::AdamWOptions>(
                                   torch::optim::AdamWOptions(rate)
                                       .betas({config.adam_beta1, config.adam_beta2})
                                       .weight_decay(decay)));
    sgd.emplace_back(
        params,
        std::make_unique<torch::optim::SGDOptions>(
            torch::optim::SGDOptions(rate).momentum(config.sgd_momentum).weight_decay(decay)));
  }
  if (config.optimizer == OptimizerKind::adam) {
    torch::optim::AdamW optimizer(adamw);
    return train_plainly(net, [&] { optimizer.step(); });
  }
  torch::optim::SGD optimizer(sgd, torch::optim::SGDOptions(config.lr));
  return train_plainly(net, [&] { optimizer.step(); });
}

/// `tolerance` is relative to the largest element of each tensor.
inline void expect_close(const Weights& found, const Weights& expected, double tolerance,
                         const std::string& what) {
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE((found[i].to(at::kDouble) - expected[i]).abs().max().item<double>(),
              tolerance * expected[i].abs().max().item<double>())
        << what << ", parameter " << i;
}

}  // namespace lockstep::testing
