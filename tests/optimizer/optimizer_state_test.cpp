#include <gtest/gtest.h>

#include <map>
#include <mutex>

#include "lockstep/core/error.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::kLayers;
using testing::reduce_gradients;
using testing::run_backwards;
using testing::run_ranks;
using testing::Setting;
using testing::SmallNet;
using testing::throws_with;

/// The contents of a checkpoint, by parameter and name: whole flat tensors, assembled from slices.
struct Saved {
  std::map<std::pair<std::string, std::string>, at::Tensor> tensors;
  std::map<std::string, at::Tensor> params;
  OptimizerProgress progress;
  std::mutex mutex;
};

int64_t numel_of(const StateSlice& slice) {
  int64_t numel = 1;
  for (const int64_t size : slice.shape) numel *= size;
  return numel;
}

/// Trains one rank for `steps` steps, starting at step `first` from `loaded`. Leaves its state in
/// `saved`.
void train(const ParallelState& state, const Setting& setting, at::ScalarType dtype, int first,
           int steps, Saved* loaded, Saved& saved) {
  SmallNet net(kLayers, dtype);
  DistributedDataParallel ddp(net, state, setting.ddp());
  const auto optimizer = make_optimizer({&ddp}, adamw_config());
  if (loaded) {
    const at::NoGradGuard no_grad;
    if (dtype == at::kDouble)  // bf16 parameters follow the master weights
      for (const auto& param : net.named_parameters())
        at::Tensor(param.value()).copy_(loaded->params.at(param.key()));
    for (StateSlice& slice : optimizer->state_slices())
      for (auto& [name, tensor] : slice.values)
        tensor.copy_(loaded->tensors.at({slice.parameter, name})
                         .slice(0, slice.range.start, slice.range.end));
    optimizer->restore(loaded->progress);
    optimizer->apply_master_weights();
  }
  for (int step = first; step < first + steps; ++step) {
    ddp.zero_grad_buffer();
    run_backwards(net, ddp, step, setting.microbatches, dtype);
    reduce_gradients(ddp);
    optimizer->step();
  }
  ddp.finish_param_sync();
  const std::lock_guard<std::mutex> lock(saved.mutex);
  for (const StateSlice& slice : optimizer->state_slices())
    for (const auto& [name, tensor] : slice.values) {
      at::Tensor& whole = saved.tensors[{slice.parameter, name}];
      if (!whole.defined()) whole = at::full({numel_of(slice)}, -7.0, tensor.options());
      whole.slice(0, slice.range.start, slice.range.end).copy_(tensor);
    }
  for (const auto& param : net.named_parameters())
    saved.params[param.key()] = param.value().detach().clone();
  saved.progress = optimizer->progress();
}

TEST(OptimizerState, ALoadedRunGoesOnAsIfItHadNotStoppedOnAnyOtherLayout) {
  const Setting four = {.ranks = 4, .overlap_gather = true, .bucket_size = 40};
  const Setting others[] = {four,
                            {.ranks = 3, .bucket_size = 100},
                            {.ranks = 2, .distributed = false},
                            {.ranks = 1, .distributed = false}};
  for (const at::ScalarType dtype : {at::kDouble, at::kBFloat16}) {
    Saved half, whole;
    const auto run = [&](const Setting& setting, int first, int steps, Saved* from, Saved& to) {
      run_ranks(setting.ranks, [&](const ParallelState& state) {
        train(state, setting, dtype, first, steps, from, to);
      });
    };
    run(four, 0, 4, nullptr, half);
    run(four, 0, 8, nullptr, whole);
    EXPECT_EQ(whole.progress.num_steps, 8);
    for (const Setting& setting : others) {
      Saved resumed;
      run(setting, 4, 4, &half, resumed);
      EXPECT_EQ(resumed.progress, whole.progress) << setting.text();
      ASSERT_EQ(resumed.tensors.size(), whole.tensors.size());
      const double tolerance = dtype == at::kDouble ? 1e-11 : 5e-2;
      for (const auto& [key, tensor] : whole.tensors)
        EXPECT_TRUE(at::allclose(resumed.tensors.at(key), tensor, tolerance, tolerance))
            << setting.text() << ", " << key.second << " of " << key.first;
      if (setting.ranks != 4) continue;
      for (const auto& [key, tensor] : whole.tensors)
        EXPECT_TRUE(at::equal(resumed.tensors.at(key), tensor)) << key.first;
    }
  }
}

TEST(OptimizerState, SlicesNameEveryElementOnceAndSayWhatTheyHold) {
  for (const bool distributed : {false, true}) {
    std::map<std::string, int64_t> elements;
    std::mutex mutex;
    run_ranks(3, [&](const ParallelState& state) {
      SmallNet net(kLayers, at::kBFloat16);
      const Setting setting = {.distributed = distributed, .bucket_size = 40};
      DistributedDataParallel ddp(net, state, setting.ddp());
      const auto optimizer = make_optimizer({&ddp}, adamw_config());
      int64_t bytes = 0;
      for (const StateSlice& slice : optimizer->state_slices()) {
        ASSERT_EQ(slice.values.size(), 3u);
        EXPECT_EQ(slice.values[0].name, "master");
        EXPECT_EQ(slice.values[1].name, "exp_avg");
        EXPECT_EQ(slice.values[2].name, "exp_avg_sq");
        for (const auto& [name, tensor] : slice.values) {
          EXPECT_EQ(tensor.numel(), slice.range.numel());
          bytes += static_cast<int64_t>(tensor.nbytes());
        }
        const at::Tensor param = net.named_parameters()[slice.parameter];
        EXPECT_EQ(param.sizes(), at::IntArrayRef(slice.shape));
        EXPECT_EQ(slice.description.apply_weight_decay, param.dim() > 1);
        EXPECT_TRUE(
            at::equal(slice.values[0].tensor,
                      param.flatten().slice(0, slice.range.start, slice.range.end).to(at::kFloat)));
        const std::lock_guard<std::mutex> lock(mutex);
        elements[slice.parameter] += slice.range.numel();
      }
      EXPECT_LE(bytes, optimizer->state_bytes());
    });
    const SmallNet net(kLayers);
    for (const auto& param : net.named_parameters())
      EXPECT_EQ(elements[param.key()], param.value().numel() * (distributed ? 1 : 3));
  }
}

TEST(OptimizerState, G100HalfOfTenParametersHaveWeightDecay) {
  SmallNet net(5);
  DistributedDataParallel ddp(net, ParallelState::single_process());
  const Optimizer optimizer({&ddp}, {});
  std::vector<std::string> with, without;
  for (const StateSlice& slice : optimizer.state_slices())
    (slice.description.apply_weight_decay ? with : without).push_back(slice.parameter);
  EXPECT_EQ(with,
            (std::vector<std::string>{"weight4", "weight3", "weight2", "weight1", "weight0"}));
  EXPECT_EQ(without, (std::vector<std::string>{"bias4", "bias3", "bias2", "bias1", "bias0"}));
}

TEST(OptimizerState, ProgressThatCannotBeIsRefused) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  Optimizer optimizer({&ddp}, {});
  EXPECT_TRUE(
      throws_with<ConfigError>([&] { optimizer.restore({.num_steps = -1}); }, "found -1 steps"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] { optimizer.restore({.scaler = GradScalerState{.scale = 0}}); }, "loss scale: found 0"));
}

}  // namespace
}  // namespace lockstep
