// Tensor::register_hook() of parameters: each hook gets the whole gradient of a backward once, and
// what it returns is accumulated, wherever a layer could have added the gradient itself.

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <optional>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/models/recompute.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::NamedTensors;
using testing::small_gpt;

/// A factor for each element, some of them 0.
at::Tensor mask_of(const at::Tensor& parameter) {
  return at::arange(parameter.numel(), at::kDouble).remainder(3).view(parameter.sizes());
}

/// Multiplies the gradients of each parameter, counting the calls.
void register_masks(const torch::nn::Module& module, std::map<std::string, int>& calls) {
  for (const NamedParameter& param : collect_parameters(module)) {
    at::Tensor(param.tensor)
        .register_hook(
            [mask = mask_of(param.tensor), &count = calls[param.name]](const at::Tensor& grad) {
              ++count;
              return grad * mask;
            });
  }
}

struct HookedCase {
  ShardingStrategy strategy = ShardingStrategy::no_shard;
  int64_t microbatches = 1;
  bool recomputed = false;
  bool deferred = false;
  bool tied = false;
  std::optional<int64_t> chunk = {};

  std::string text() const {
    return std::string(to_string(strategy)) + ", micro-batches " + std::to_string(microbatches) +
           (recomputed ? ", recomputed" : "") + (deferred ? ", deferred" : "") +
           (tied ? ", tied" : "") + (chunk ? ", chunks" : "");
  }
  TransformerConfig model() const {
    TransformerConfig config = small_gpt();
    config.untie_embeddings_and_output_weights = !tied;
    return config;
  }
};

at::Tensor loss_of(const GPTModel& model, int64_t microbatch) {
  const at::Tensor ids = testing::sample_ids(small_gpt(), 2).narrow(0, microbatch, 1);
  return model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum();
}

/// The masked gradients of a model without hooks and wrapper.
NamedTensors masked_plainly(const HookedCase& of) {
  const GPTModel model(of.model(), {.dtype = at::kDouble});
  for (int64_t m = 0; m < of.microbatches; ++m) loss_of(model, m).backward();
  NamedTensors result;
  for (const NamedParameter& param : collect_parameters(model))
    result[param.name] = param.tensor.grad() * mask_of(param.tensor);
  return result;
}

/// The reduced gradients on every rank, by name.
NamedTensors whole_gradients(const DistributedDataParallel& ddp, const ParallelState& state) {
  NamedTensors result;
  for (const ParamAndGradBuffer* buffer : ddp.buffers()) {
    const at::Tensor flat = at::zeros({buffer->layout().numel}, at::kDouble);
    for (const ElementRange& range : buffer->owned())
      flat.slice(0, range.start, range.end).copy_(buffer->held_grads(range));
    if (ddp.is_sharded())
      all_reduce(state.group(GroupKind::dp_cp), flat, ReduceOp::sum, "gradients").wait();
    for (size_t i = 0; i < buffer->params().size(); ++i) {
      const ParamLayout::Slot& slot = buffer->layout().slots[i];
      const NamedParameter& param = buffer->params()[i];
      result[param.name] = flat.slice(0, slot.start, slot.end).view(param.tensor.sizes());
    }
  }
  return result;
}

/// Both ranks see the same samples, so the mean of their gradients is that of one.
void expect_masked(const ParallelState& state, const HookedCase& of, const NamedTensors& expected) {
  SCOPED_TRACE(of.text());
  TransformerConfig config = of.model();
  config.cross_entropy_chunk_size = of.chunk;
  if (of.recomputed) config.recompute_granularity = RecomputeGranularity::full;
  const auto deferred = of.deferred ? std::make_shared<DeferredGradients>() : nullptr;
  const GPTModel model(config, {.dtype = at::kDouble, .deferred = deferred});
  DistributedDataParallelConfig ddp_config;
  ddp_config.bucket_size = 100;
  ddp_config.calculate_per_token_loss = false;
  ddp_config.use_distributed_optimizer = of.strategy != ShardingStrategy::no_shard;
  ddp_config.data_parallel_sharding_strategy = of.strategy;
  DistributedDataParallel ddp(model, state, ddp_config);
  ddp.set_num_microbatches(of.microbatches);
  std::map<std::string, int> calls;
  register_masks(model, calls);
  ddp.zero_grad_buffer();
  for (int64_t m = 0; m < of.microbatches; ++m) {
    if (deferred) deferred->defer(true);
    loss_of(model, m).backward();
    if (!deferred) continue;
    const at::NoGradGuard no_grad;
    for (const auto& task : deferred->take()) task();
  }
  ddp.finish_grad_sync();
  EXPECT_LT(testing::difference(whole_gradients(ddp, state), expected), 1e-12);
  for (const auto& [name, count] : calls) EXPECT_EQ(count, of.microbatches) << name;
}

TEST(TensorHooks, OfAModelInAWrapperGetEachGradientOnce) {
  for (const bool tied : {false, true})
    for (const int64_t microbatches : {1, 2}) {
      const NamedTensors expected = masked_plainly({.microbatches = microbatches, .tied = tied});
      testing::run_ranks(2, [&](const ParallelState& state) {
        for (const auto strategy : {ShardingStrategy::no_shard, ShardingStrategy::optim_grads})
          for (const bool recomputed : {false, true})
            for (const bool deferred : {false, true})
              for (const auto chunk : {std::optional<int64_t>(), std::optional<int64_t>(3)})
                expect_masked(state,
                              {.strategy = strategy,
                               .microbatches = microbatches,
                               .recomputed = recomputed,
                               .deferred = deferred,
                               .tied = tied,
                               .chunk = chunk},
                              expected);
      });
    }
}

/// libtorch's layers, used in recomputed functions, in one inside another, and outside.
struct Reused : torch::nn::Module {
  Reused() {
    linear = register_module("linear", torch::nn::Linear(3, 3));
    norm = register_parameter("norm", at::ones({3}));
    to(at::kDouble);
    const at::NoGradGuard no_grad;
    for (at::Tensor& p : parameters())
      p.copy_(at::sin(at::arange(1, p.numel() + 1, at::kDouble)).view(p.sizes()));
  }
  at::Tensor loss(bool recomputed) {
    const RecomputedFunction layer = [this](const std::vector<at::Tensor>& in) {
      return at::tanh(linear->forward(at::layer_norm(in[0], {3}, norm)));
    };
    const RecomputedFunction twice = [layer](const std::vector<at::Tensor>& in) {
      return recompute(layer, {layer(in) + in[0]});
    };
    at::Tensor h = linear->forward(at::sin(at::arange(12, at::kDouble)).view({4, 3}));
    h = recomputed ? recompute(layer, {h}) : layer({h});
    h = recomputed ? recompute(twice, {h}) : layer({layer({h}) + h});
    return (h * norm).square().sum();
  }
  torch::nn::Linear linear = nullptr;
  at::Tensor norm;
};

TEST(TensorHooks, OfParametersThatRecomputedFunctionsShareGetTheSumOnce) {
  Reused plain;
  plain.loss(/*recomputed=*/false).backward();
  for (const bool wrapped : {false, true}) {
    Reused net;
    std::optional<DistributedDataParallel> ddp;
    if (wrapped) ddp.emplace(net, ParallelState::single_process());
    std::map<std::string, int> calls;
    register_masks(net, calls);
    net.loss(/*recomputed=*/true).backward();
    if (ddp) ddp->finish_grad_sync();
    const auto expected = plain.parameters(), found = net.parameters();
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_LT(testing::difference(found[i].grad(), expected[i].grad() * mask_of(expected[i])),
                1e-13)
          << wrapped << " " << i;
    for (const auto& [name, count] : calls) EXPECT_EQ(count, 1) << name;
    // They are in place again afterwards.
    const at::Tensor norm = torch::autograd::grad({net.loss(true)}, {net.norm})[0];
    EXPECT_LT(testing::difference(norm, plain.norm.grad() * mask_of(norm)), 1e-13) << wrapped;
    EXPECT_EQ(calls.at("norm"), 2);
  }
}

}  // namespace
}  // namespace lockstep
