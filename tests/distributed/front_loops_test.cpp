// The loops of docs/fronts.md, one for each front. They train the same net on the same samples, so
// they must reach the same weights. A test of the source tree compares the text between the marks
// with the page.

#include <gtest/gtest.h>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/all_reduce_grads.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/clip_grad_norm.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

constexpr int64_t kTrainedSteps = 10, kMicrobatches = 3, kSamples = 6;
constexpr double kRate = 0.5, kClip = 0.3;

struct Net : testing::SmallNet {
  /// The mean over the samples of one micro-batch on one rank.
  at::Tensor mean_loss(const ParallelState& state, int64_t step, int64_t microbatch) const {
    const int64_t number = (step * kMicrobatches + microbatch) * state.world_size() + state.rank();
    return loss(samples(number * kSamples, kSamples)) / kSamples;
  }
};

void loop_of_distributed_data_parallel(const ParallelState& state, Net& net) {
  // [DistributedDataParallel]
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;  // the loss is a mean
  DistributedDataParallel ddp(net, state, config);
  ddp.set_num_microbatches(kMicrobatches);
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kTrainedSteps; ++step) {
    ddp.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();
    finalize_model_grads({&ddp});
    clip_grad_norm_({&ddp}, kClip);
    optimizer.step();
  }
  // [DistributedDataParallel]
}

void loop_of_gradient_synchronizer(const ParallelState& state, Net& net) {
  // [GradientSynchronizer]
  const DeviceMesh mesh(state, {state.world_size()}, {"dp"});
  std::vector<MeshParameter> parameters;
  for (const auto& item : net.named_parameters())
    parameters.emplace_back(DTensor::from_local(item.value(), mesh, {Replicate{}}), item.key());
  GradientSynchronizer sync({parameters}, /*bucket_size_mb=*/25, kMicrobatches,
                            {.reduction = GradientReduction::mean});
  sync.bind();
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kTrainedSteps; ++step) {
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();  // the last one reduces
    sync.wait();
    clip_grad_norm_(parameters, kClip);
    optimizer.step();
    sync.zero_grad();
  }
  // [GradientSynchronizer]
}

void loop_of_all_reduce_grads(const ParallelState& state, Net& net) {
  // [all_reduce_grads]
  const DeviceMesh world(state, {state.world_size(), 1}, {"dp", "cp"});
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kTrainedSteps; ++step) {
    optimizer.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m)
      (net.mean_loss(state, step, m) / kMicrobatches).backward();
    all_reduce_grads(net, world, /*use_ddp=*/false);
    clip_grad_norm_(net, kClip);
    optimizer.step();
  }
  // [all_reduce_grads]
}

void loop_of_reducer(const ParallelState& state, Net& net) {
  // [Reducer]
  Reducer reducer(net, state.group(GroupKind::dp_cp));
  torch::optim::SGD optimizer(net.parameters(), kRate);
  for (int64_t step = 0; step < kTrainedSteps; ++step) {
    reducer.zero_grad();
    for (int64_t m = 0; m < kMicrobatches; ++m) {
      Reducer::NoSyncGuard no_sync;
      if (m + 1 < kMicrobatches) no_sync = reducer.no_sync();
      reducer.prepare_for_forward();
      const at::Tensor loss = net.mean_loss(state, step, m) / kMicrobatches;
      reducer.prepare_for_backward({loss});
      loss.backward();
    }
    clip_grad_norm_(net, kClip);
    optimizer.step();
  }
  // [Reducer]
}

TEST(FrontLoops, AllArriveAtTheWeightsOfOneProcess) {
  // One process treats the samples of all ranks as more micro-batches.
  constexpr int64_t kRanks = 3;
  Net alone;
  double first_loss = 0, last_loss = 0;
  torch::optim::SGD optimizer(alone.parameters(), kRate);
  for (int64_t step = 0; step < kTrainedSteps; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = at::zeros({}, at::kDouble);
    for (int64_t i = 0; i < kMicrobatches * kRanks; ++i)
      loss = loss +
             alone.loss(Net::samples((step * kMicrobatches * kRanks + i) * kSamples, kSamples)) /
                 (kSamples * kMicrobatches * kRanks);
    loss.backward();
    (step == 0 ? first_loss : last_loss) = loss.item<double>();
    clip_grad_norm_(alone, kClip);
    optimizer.step();
  }
  EXPECT_LT(last_loss, 0.5 * first_loss);
  for (const auto loop : {loop_of_distributed_data_parallel, loop_of_gradient_synchronizer,
                          loop_of_all_reduce_grads, loop_of_reducer})
    testing::run_ranks(kRanks, [&](const ParallelState& state) {
      Net net;
      loop(state, net);
      for (size_t i = 0; i < net.parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net.parameters()[i], alone.parameters()[i], 1e-12, 1e-13)) << i;
    });
}

template <class Front>
constexpr bool kOpensTheEngine = requires(Front& front) {
  front.begin_finalize();
}
|| requires(Front& front) { front.end_finalize(); }
|| requires(Front& front) { front.buffers()[0]->zero_grad(); };
static_assert(!kOpensTheEngine<DistributedDataParallel>);

TEST(FrontLoops, AGradientThatIsReplacedBeforeItIsClippedOrUsedIsNamed) {
  const ParallelState state = ParallelState::single_process();
  Net net;
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  DistributedDataParallel ddp(net, state, config);
  OptimizerConfig rates;
  rates.lr = kRate;
  Optimizer optimizer({&ddp}, rates);
  net.mean_loss(state, 0, 0).backward();
  finalize_model_grads({&ddp});
  const at::Tensor weight = net.parameters()[0];
  const at::Tensor gradient = weight.grad(), before = weight.detach().clone();
  weight.mutable_grad() = gradient * 0.5;  // only in place does it change what the step uses
  const char* const text = "the gradient of 'weight0' no longer lies in its buffer";
  EXPECT_TRUE(testing::throws_with<UsageError>([&] { clip_grad_norm_({&ddp}, kClip); }, text));
  EXPECT_TRUE(testing::throws_with<UsageError>([&] { optimizer.step(); }, text));
  EXPECT_TRUE(at::equal(weight, before));
  weight.mutable_grad() = gradient;
  optimizer.step();
  EXPECT_FALSE(at::equal(weight, before));
}

TEST(FrontLoops, SharedNamesDoWhatThePeersNamesDo) {
  testing::run_ranks(2, [](const ParallelState& state) {
    Net net;
    GradientSynchronizer sync(net, state, /*bucket_size_mb=*/1, /*require_accumulations=*/1);
    sync.bind();
    sync.set_num_microbatches(2);
    net.mean_loss(state, 0, 0).backward();
    EXPECT_EQ(sync.state_text(), "accumulating 1/2");
    net.mean_loss(state, 0, 1).backward();
    sync.wait();
    sync.unbind();

    Reducer reducer(net, state.group(GroupKind::dp_cp));
    reducer.prepare_for_forward();
    const at::Tensor loss = net.mean_loss(state, 0, 0);
    reducer.prepare_for_backward({loss});
    loss.backward();
    EXPECT_GT(net.parameters()[0].grad().abs().sum().item<double>(), 0);
    reducer.zero_grad();
    EXPECT_EQ(net.parameters()[0].grad().abs().sum().item<double>(), 0);
  });
}

}  // namespace
}  // namespace lockstep
