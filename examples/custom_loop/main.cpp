// A custom training loop, on any number of data-parallel ranks: a torch::nn model that knows
// nothing of Lockstep learns to add up its inputs.
//
// Run alone, or under any launcher: torchrun --no-python --nproc-per-node 2 ./custom_loop

#include <cstdio>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"

namespace {

constexpr int64_t kInputs = 8, kSamples = 16, kMicrobatches = 2, kSteps = 300;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(kInputs, 32));
    second = register_module("second", torch::nn::Linear(32, 1));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))).squeeze(-1); }

  torch::nn::Linear first{nullptr}, second{nullptr};
};

/// Samples of a rank that no other rank and no other step has.
at::Tensor make_batch(int64_t rank, int64_t ranks, int64_t step, int64_t microbatch) {
  const int64_t number = (step * kMicrobatches + microbatch) * ranks + rank;
  const at::Tensor i = at::arange(kSamples * kInputs, at::kFloat) + 0.37 * number;
  return at::sin(i * i * 0.61).view({kSamples, kInputs});
}

double train() {
  // [snippet]
  lockstep::ParallelState state(lockstep::read_launch_environment());
  Net net;
  lockstep::DistributedDataParallel ddp(net, state);
  ddp.set_num_microbatches(kMicrobatches);
  lockstep::OptimizerConfig config;
  config.lr = 0.01;
  config.clip_grad = 1;  // the default: larger norms are scaled down to 1; 0 turns clipping off
  lockstep::Optimizer optimizer({&ddp}, config);

  const auto ranks = state.group(lockstep::GroupKind::dp_cp);
  at::Tensor mean_loss;
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    at::Tensor loss_sum = at::zeros({});
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      const at::Tensor x = make_batch(ranks.rank(), ranks.size(), step, m);
      const at::Tensor loss = (net.forward(x) - x.sum(1)).square().sum();  // a sum over samples
      loss.backward();  // the last micro-batch reduces each bucket as soon as it is complete
      loss_sum += loss.detach();
    }
    const at::Tensor samples = at::full({}, kMicrobatches * kSamples);
    const auto report = lockstep::finalize_model_grads({&ddp}, samples);
    optimizer.step();

    lockstep::all_reduce(ranks, loss_sum, lockstep::ReduceOp::sum, "loss").wait();
    mean_loss = loss_sum / report.num_tokens;
    if (state.rank() == 0 && step % 50 == 0)
      std::printf("step %3d  loss %.5f\n", static_cast<int>(step), mean_loss.item<double>());
  }
  // [snippet]
  if (state.rank() == 0) std::printf("final loss %.5f\n", mean_loss.item<double>());
  return mean_loss.item<double>();
}

}  // namespace

int main() {
  try {
    constexpr double kGood = 0.05;  // the untrained net is at about 4
    return train() < kGood ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "custom_loop: %s\n", error.what());
    return 2;
  }
}
