// What a loop of its own may save: buffers with infinities, one list per saver, gathered weights.

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_saver.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/optimizer/sharded_run.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::TemporaryFolder;
using testing::throws_with;

/// A weight and the usual mask of causal attention.
struct MaskedNet : torch::nn::Module {
  MaskedNet() {
    weight = register_parameter("weight", at::arange(6, at::kDouble));
    mask = register_buffer("mask", at::full({3, 3}, -INFINITY).triu(1));
  }
  at::Tensor weight, mask;
};

TrainingProgress after(int64_t iteration) {
  TrainingProgress progress;
  progress.iteration = iteration;
  return progress;
}

TEST(OwnState, AMaskOfInfinitiesIsSavedAndAnInfiniteWeightIsNot) {
  const TemporaryFolder folder;
  run_ranks(2, [&](const ParallelState& state) {
    MaskedNet net, other;
    CheckpointSaver saver(state, {.folder = folder.path()});
    const SaveResult saved = saver.save(model_state(net, state), after(1), Config{});
    ASSERT_EQ(saved.last_error, "");
    const at::NoGradGuard no_grad;
    other.weight.zero_();
    other.mask.zero_();
    CheckpointReader reader(saved.path);
    load_state(reader, model_state(other, state));
    EXPECT_TRUE(at::equal(other.weight, net.weight));
    EXPECT_TRUE(at::equal(other.mask, net.mask));
    net.weight[2] = INFINITY;
    EXPECT_TRUE(throws_with<DivergenceError>(
        [&] { saver.save(model_state(net, state), after(2), Config{}); },
        "tensor 'weight': found 1 of 6 elements that are not finite"));
  });
}

TEST(OwnState, ASaverRefusesAnotherList) {
  const TemporaryFolder folder;
  run_ranks(2, [&](const ParallelState& state) {
    MaskedNet net;
    CheckpointSaver saver(state, {.folder = folder.path()});
    const std::vector<StateTensor> whole = model_state(net, state);
    const std::vector<StateTensor> weight = {whole.front()};
    saver.save(weight, after(1), Config{});
    EXPECT_TRUE(throws_with<FileError>([&] { saver.save(whole, after(2), Config{}); },
                                       "tensor number 1: found 'mask', allowed: none, as in the "
                                       "first save"));
    EXPECT_TRUE(throws_with<FileError>([&] { saver.save({}, after(2), Config{}); },
                                       "tensor number 0: found none, allowed: 'weight'"));
    EXPECT_EQ(saver.save(weight, after(3), Config{}).last_error, "");
  });
  EXPECT_EQ(complete_checkpoints(folder.path()).size(), 2u);
}

TEST(OwnState, ShardedWeightsMustBeGathered) {
  run_ranks(2, [](const ParallelState& state) {
    testing::Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    EXPECT_TRUE(throws_with<UsageError>([&] { model_state(training.net, state); },
                                        "is sharded over the data-parallel ranks"));
    training.ddp.unshard();
    EXPECT_EQ(model_state(training.net, state).size(), 11u);
  });
}

}  // namespace
}  // namespace lockstep
