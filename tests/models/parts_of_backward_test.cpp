// Backwards whose weight gradients come later (ZB-H1): what is recomputed in them, and which
// micro-batch their gradients belong to.

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/recompute.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/pipeline/split_backward.h"

namespace lockstep {
namespace {

constexpr int64_t kIn = 4, kOut = 8;

ParallelContext context_of(const std::string& name) {
  return {.options = at::kDouble, .name = name + "."};
}

at::Tensor input_of_microbatch(int64_t microbatch) {
  const auto seed = static_cast<double>(microbatch);
  return at::sin(at::arange(6 * kIn, at::kDouble) * 0.7 + seed).view({2, 3, kIn});
}

std::shared_ptr<ColumnParallelLinear> linear(const ParallelContext& context, bool bias) {
  return std::make_shared<ColumnParallelLinear>(context, kIn, kOut, bias, 0.3);
}

/// A norm and a linear layer, recomputed together.
struct Recomputing : torch::nn::Module {
  Recomputing() {
    norm = register_module(
        "norm", std::make_shared<Norm>(context_of("norm"), kIn, Normalization::LayerNorm, 1e-5));
    column = register_module("column", linear(context_of("column"), true));
  }
  at::Tensor output(const at::Tensor& x, bool recomputed) {
    const auto run = [this](const std::vector<at::Tensor>& in) {
      ++runs;
      return at::tanh(column->forward(norm->forward(in[0])));
    };
    return recomputed ? recompute(run, {x}) : run({x});
  }
  std::shared_ptr<Norm> norm;
  std::shared_ptr<ColumnParallelLinear> column;
  int runs = 0;
};

void expect_grads(const torch::nn::Module& found, const torch::nn::Module& expected) {
  const auto found_parameters = found.parameters(), parameters = expected.parameters();
  for (size_t i = 0; i < parameters.size(); ++i)
    EXPECT_TRUE(at::allclose(found_parameters[i].grad(), parameters[i].grad(), 1e-13, 1e-14)) << i;
}

TEST(PartsOfBackward, WhatIsRecomputedIsDoneOnceInTheFirst) {
  Recomputing plain;
  const at::Tensor x = input_of_microbatch(0).requires_grad_(true);
  plain.output(x, /*recomputed=*/false).sum().backward();
  for (const bool wrapped : {false, true}) {
    Recomputing net;
    std::optional<DistributedDataParallel> ddp;
    if (wrapped) ddp.emplace(net, ParallelState::single_process());
    const at::Tensor own = input_of_microbatch(0).requires_grad_(true);
    const at::Tensor loss = net.output(own, /*recomputed=*/true).sum();
    SplitBackward split(loss, own);
    EXPECT_TRUE(at::allclose(split.input_part(at::ones_like(loss)), x.grad(), 1e-13));
    EXPECT_EQ(net.runs, 2);
    split.weight_part();
    EXPECT_EQ(net.runs, 2);
    if (ddp) ddp->finish_grad_sync();
    expect_grads(net, plain);
  }
}

TEST(PartsOfBackward, APipelineWithoutDeferredGradientsRecomputesLayersOfAWrappedModel) {
  constexpr int64_t kMicrobatches = 3;
  Recomputing plain, net;
  for (int64_t m = 0; m < kMicrobatches; ++m)
    plain.output(input_of_microbatch(m), /*recomputed=*/false).sum().backward();
  DistributedDataParallel ddp(net, ParallelState::single_process());
  ddp.set_num_microbatches(kMicrobatches);
  const PipelineExecutor executor(
      ParallelState::single_process(),
      make_schedule({.microbatches = kMicrobatches, .family = ScheduleFamily::zb_h1}));
  executor.run({[&](int64_t m, const at::Tensor&) {
    return net.output(input_of_microbatch(m), /*recomputed=*/true).sum();
  }});
  ddp.finish_grad_sync();
  expect_grads(net, plain);
}

/// Two layers, of which a micro-batch uses one.
struct Alternating : torch::nn::Module {
  Alternating(bool bias, const std::shared_ptr<DeferredGradients>& deferred) {
    for (const char* const name : {"even", "odd"}) {
      ParallelContext context = context_of(name);
      context.deferred = deferred;
      layers.push_back(register_module(name, linear(context, bias)));
    }
  }
  at::Tensor loss(int64_t microbatch) const {
    const at::Tensor x = input_of_microbatch(microbatch).requires_grad_(true);
    return layers[static_cast<size_t>(microbatch % 2)]->forward(x).square().sum();
  }
  std::vector<std::shared_ptr<ColumnParallelLinear>> layers;
};

/// The step is complete although no parameter gets a gradient in each micro-batch, and although
/// those of weights arrive outside of autograd.
TEST(PartsOfBackward, GradientsThatComeLaterCountForTheirMicroBatch) {
  constexpr int64_t kMicrobatches = 2;
  for (const bool bias : {false, true})
    for (const bool defers : {false, true}) {
      const Alternating plain(bias, nullptr);
      for (int64_t m = 0; m < kMicrobatches; ++m) plain.loss(m).backward();
      const auto deferred = defers ? std::make_shared<DeferredGradients>() : nullptr;
      const Alternating net(bias, deferred);
      DistributedDataParallelConfig config;
      config.allow_unused_parameters = true;
      DistributedDataParallel ddp(net, ParallelState::single_process(), config);
      ddp.set_num_microbatches(kMicrobatches);
      const PipelineExecutor executor(
          ParallelState::single_process(),
          make_schedule({.microbatches = kMicrobatches, .family = ScheduleFamily::zb_h1}),
          {.deferred = deferred});
      executor.run({[&](int64_t m, const at::Tensor&) { return net.loss(m); }});
      EXPECT_NO_THROW(ddp.finish_grad_sync()) << bias << defers;
      expect_grads(net, plain);
    }
}

}  // namespace
}  // namespace lockstep
