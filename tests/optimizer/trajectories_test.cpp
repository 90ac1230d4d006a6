// Twenty steps of training give the weights of one process of plain libtorch, on every number of
// ranks and with all settings that must not change the result.

#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/distributed_training.h"
#include "lockstep/tests/support/host_transport.h"

namespace lockstep {
namespace {

using testing::adamw_config;
using testing::expect_close;
using testing::run_ranks;
using testing::Setting;
using testing::train;
using testing::train_plainly;
using testing::Weights;

constexpr OptimizerKind kKinds[] = {OptimizerKind::adam, OptimizerKind::sgd};

/// Adam hides a wrong scale of the gradients, SGD does not.
OptimizerConfig config_with(OptimizerKind kind, double clip = testing::kClip) {
  OptimizerConfig config = adamw_config(clip);
  config.optimizer = kind;
  return config;
}

/// All-reduces and the distributed optimizer, with both kinds of overlap and buckets of any size.
Setting with_mode(size_t mode) {
  const std::array<Setting, 6> modes = {
      {{.distributed = false, .overlap_reduce = false, .bucket_size = 1000000},
       {.distributed = false, .overlap_reduce = true, .bucket_size = 100},
       {.overlap_reduce = false, .overlap_gather = false, .bucket_size = 1000000},
       {.overlap_reduce = true, .overlap_gather = false, .bucket_size = 60},
       {.overlap_reduce = false, .overlap_gather = true, .bucket_size = 100},
       {.overlap_reduce = true, .overlap_gather = true, .bucket_size = 40}}};
  return modes[mode];
}

/// Runs in one world. It is connected only once, because that takes longer than twenty steps.
struct World {
  struct Run {
    Setting setting;
    OptimizerKind kind;
    bool narrow;  ///< also in fp32 and bf16
  };
  int64_t ranks, instances;
  std::vector<Run> runs;
};

/// Every number of ranks and instances with every optimizer and every number of micro-batches.
/// Worlds with more than 4 ranks take longest: they run half of these with one instance and half
/// with two. The modes rotate from world to world, so each meets every number of ranks up to 4.
/// `everything`: every mode and every dtype in each of these.
std::vector<World> all_worlds(bool everything) {
  std::vector<World> worlds;
  for (const int64_t instances : {1, 2}) {
    size_t turn = 0;
    for (const int64_t ranks : {1, 2, 3, 4, 6, 8}) {
      if (ranks % instances != 0) continue;
      World& world = worlds.emplace_back(World{ranks, instances, {}});
      const size_t first = instances == 1 ? 0 : 2, modes = 6 - first;
      size_t cell = 0;
      const auto add = [&](size_t mode, int64_t microbatches, OptimizerKind kind, bool narrow) {
        Setting setting = with_mode(first + mode % modes);
        setting.ranks = ranks;
        setting.instances = instances;
        setting.microbatches = microbatches;
        world.runs.push_back({setting, kind, narrow});
      };
      for (const int64_t microbatches : {1, 2, 5})
        for (const OptimizerKind kind : kKinds) {
          const bool half =
              (microbatches + (kind == OptimizerKind::sgd) + instances + ranks / 2) % 2 == 0;
          for (size_t mode = 0; everything && mode < modes; ++mode)
            add(mode, microbatches, kind, true);
          if (!everything && (ranks <= 4 || half))
            add(cell + turn, microbatches, kind, ranks <= 4 ? cell == turn : world.runs.empty());
          ++cell;
        }
      ++turn;
    }
  }
  return worlds;
}

TEST(Trajectories, TwentyStepsFollowPlainLibtorch) {
  std::map<OptimizerKind, Weights> expected;
  for (const OptimizerKind kind : kKinds) expected.emplace(kind, train_plainly(config_with(kind)));
  for (const World& world : all_worlds(std::getenv("LOCKSTEP_ALL_LAYOUTS") != nullptr))
    run_ranks(
        world.ranks,
        [&](const ParallelState& state) {
          for (const World::Run& run : world.runs) {
            const auto check = [&](at::ScalarType dtype, double tolerance) {
              expect_close(train(state, run.setting, config_with(run.kind), dtype),
                           expected.at(run.kind), tolerance,
                           run.setting.text() + ", " + at::toString(dtype));
            };
            check(at::kDouble, 1e-12);
            if (!run.narrow) continue;
            check(at::kFloat, 1e-6);
            check(at::kBFloat16, 0.03);
          }
        },
        world.runs.front().setting.threads());
}

/// Sums over CPU ranks add the ranks' terms in the order of the group.
TEST(Trajectories, TheBitsDoNotDependOnBucketsOverlapOrTheWayOfReducing) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t ranks : {3, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      const auto run = [&](const Setting& setting) {
        // Without clipping, because other ranks hold the norm's terms.
        return train(state, setting, config_with(OptimizerKind::adam, /*clip=*/0), at::kFloat);
      };
      const Weights expected = run(with_mode(0));
      for (const bool distributed : {false, true})
        for (const bool overlap_reduce : {false, true})
          for (const bool overlap_gather : {false, true})
            for (const int64_t bucket_size : {1, 40, 1000000}) {
              if (overlap_gather && !distributed) continue;
              if (ranks > 3 && (bucket_size != 40 || overlap_gather != distributed)) continue;
              const Setting setting = {.ranks = ranks,
                                       .distributed = distributed,
                                       .overlap_reduce = overlap_reduce,
                                       .overlap_gather = overlap_gather,
                                       .bucket_size = bucket_size};
              const Weights found = run(setting);
              for (size_t i = 0; i < expected.size(); ++i)
                EXPECT_TRUE(at::equal(found[i], expected[i])) << setting.text();
            }
    });
}

TEST(Trajectories, Bf16ParametersAreTheSameOnAllRanks) {
  const Setting setting = {.ranks = 4, .overlap_gather = true, .bucket_size = 40};
  run_ranks(4, [&](const ParallelState& state) {
    for (const at::Tensor& param : train(state, setting, adamw_config(), at::kBFloat16)) {
      const at::Tensor first = param.clone();
      broadcast(state.world(), first, 0, "test").wait();
      EXPECT_TRUE(at::equal(first, param));
    }
  });
}

}  // namespace
}  // namespace lockstep
