// A custom update rule, on any number of data-parallel ranks: a torch::nn model learns to add up
// its inputs with Lion; the rule's state is cut over the ranks.
//
// Run alone, or under any launcher: torchrun --no-python --nproc-per-node 2 ./update_rule

#include <cstdio>

#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include "lockstep/lockstep.h"

#include "lion.h"

namespace {

constexpr int64_t kInputs = 8, kSamples = 32, kSteps = 300;

struct Net : torch::nn::Module {
  Net() {
    first = register_module("first", torch::nn::Linear(kInputs, 32));
    second = register_module("second", torch::nn::Linear(32, 1));
    const at::NoGradGuard no_grad;
    for (at::Tensor& param : parameters())
      param.copy_(0.2 * at::sin(at::arange(param.numel(), at::kFloat) * 1.7).view(param.sizes()));
  }
  at::Tensor forward(const at::Tensor& x) { return second(at::tanh(first(x))).squeeze(-1); }

  torch::nn::Linear first{nullptr}, second{nullptr};
};

/// The same samples of a step for any number of ranks.
at::Tensor make_batch(int64_t step) {
  const at::Tensor i = at::arange(kSamples * kInputs, at::kFloat) + 0.37 * step;
  return at::sin(i * i * 0.61).view({kSamples, kInputs});
}

double train() {
  lockstep::ParallelState state(lockstep::read_launch_environment());
  const auto ranks = state.group(lockstep::GroupKind::dp_cp);
  Net net;
  lockstep::DistributedDataParallelConfig sharded;
  sharded.use_distributed_optimizer = true;
  sharded.overlap_param_gather = true;
  lockstep::DistributedDataParallel ddp(net, state, sharded);
  lockstep::OptimizerConfig config;
  config.lr = 0.003;
  lockstep::Optimizer optimizer({&ddp}, config, {}, std::make_shared<Lion>());

  at::Tensor loss;
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad();
    const at::Tensor x =
        make_batch(step).tensor_split(ranks.size())[static_cast<size_t>(ranks.rank())];
    const at::Tensor sum = (net.forward(x) - x.sum(1)).square().sum();
    sum.backward();
    lockstep::finalize_model_grads({&ddp}, at::full({}, x.size(0)));
    optimizer.step();

    loss = sum.detach() / kSamples;
    lockstep::all_reduce(ranks, loss, lockstep::ReduceOp::sum, "loss").wait();
    if (state.rank() == 0 && step % 50 == 0)
      std::printf("step %3d  loss %.5f\n", static_cast<int>(step), loss.item<double>());
  }
  ddp.finish_param_sync();
  if (state.rank() == 0)
    std::printf("final loss %.5f, %d bytes of state\n", loss.item<double>(),
                static_cast<int>(optimizer.state_bytes()));
  return loss.item<double>();
}

}  // namespace

int main() {
  try {
    constexpr double kGood = 0.1;  // the untrained net is at about 4
    return train() < kGood ? 0 : 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "update_rule: %s\n", error.what());
    return 2;
  }
}
