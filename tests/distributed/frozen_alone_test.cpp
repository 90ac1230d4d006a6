// What only some ranks have frozen.

#include <gtest/gtest.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/open_ranks.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::errors_of_open_ranks;
using testing::expect_all_contain;
using testing::RankThreadOptions;

RankThreadOptions over_tp() {
  RankThreadOptions options;
  options.sizes.tensor = 2;
  return options;
}

/// The fronts that take a module and the ParallelState.
const std::vector<
    std::pair<const char*, std::function<void(DescribedParams&, const ParallelState&)>>>
    kFrontsOfModules = {
        {"DistributedDataParallel",
         [](auto& net, auto& state) { DistributedDataParallel(net, state); }},
        {"GradientSynchronizer",
         [](auto& net, auto& state) { GradientSynchronizer(net, state, 1, 1).bind(); }},
        {"Reducer", [](auto& net, auto& state) { Reducer(net, state); }}};

TEST(FrozenAlone, AWeightThatOneTensorParallelRankFreezesIsNamedByEveryFront) {
  const std::pair<const char*, ParamDescription> weights[] = {
      {"cut", {.placements = {{MeshAxis::tp, Shard{0}}}}}, {"whole", {}}};
  for (const auto& [front, call] : kFrontsOfModules)
    for (const auto& [kind, description] : weights) {
      const auto errors = errors_of_open_ranks(
          2,
          [&, &wrap = call, &described = description](const ParallelState& state) {
            DescribedParams net;
            net.add("norm", {4}).add("w", {4, 2}, described);
            if (state.rank() == 1) net["w"].set_requires_grad(false);
            wrap(net, state);
          },
          over_tp());
      expect_all_contain(errors, "parameter 'w' is trained on rank 0 and frozen on rank 1",
                         std::string(front) + ", " + kind);
    }
}

TEST(FrozenAlone, ARankThatTrainsNothingEndsAll) {
  const char* const wanted[] = {"'w'", "parameter 'w' is trained on rank 0 and frozen on rank 1",
                                "none of the 1 parameters requires a gradient"};
  for (size_t i = 0; i < kFrontsOfModules.size(); ++i) {
    const auto& [front, call] = kFrontsOfModules[i];
    const auto errors = errors_of_open_ranks(2, [&, &wrap = call](const ParallelState& state) {
      DescribedParams net;
      net.add("w", {4, 2});
      if (state.rank() == 1) net["w"].set_requires_grad(false);
      wrap(net, state);
    });
    expect_all_contain(errors, wanted[i], front);
  }
}

TEST(FrozenAlone, APipelineStageThatTrainsNothingTakesPartInTheSteps) {
  for (const bool sharded : {false, true}) {
    RankThreadOptions options;
    options.timeout = std::chrono::seconds(6);
    options.sizes.pipeline = 2;
    testing::run_ranks(
        4,
        [&](const ParallelState& state) {
          const bool first_stage = state.group(GroupKind::pp).rank() == 0;
          DescribedParams net;
          net.add("w", {4});
          if (first_stage) net["w"].set_requires_grad(false);
          DistributedDataParallelConfig config;
          config.use_distributed_optimizer = config.overlap_param_gather = sharded;
          config.align_param_gather = sharded;
          DistributedDataParallel ddp(net, state, config);
          OptimizerConfig sgd;
          sgd.optimizer = OptimizerKind::sgd;
          sgd.sgd_momentum = sgd.weight_decay = sgd.clip_grad = 0;
          sgd.lr = 0.5;
          Optimizer optimizer({&ddp}, sgd);
          for (int step = 1; step <= 2; ++step) {
            ddp.zero_grad();
            if (!first_stage) net.backward([](const auto&, const at::Tensor&) { return 3; });
            finalize_model_grads({&ddp}, at::full({}, first_stage ? 0 : 2));
            EXPECT_DOUBLE_EQ(optimizer.step().grad_norm, 3);  // 6 / 4 tokens, 4 elements
            ddp.finish_param_sync();
            EXPECT_TRUE(
                at::equal(net["w"], at::full({4}, first_stage ? 0 : -0.75 * step, at::kDouble)));
          }
        },
        options);
  }
}

TEST(FrozenAlone, TensorParallelRanksCompareWhatTheyFreezeWithEightBytes) {
  testing::CollectiveLog log;
  RankThreadOptions options = over_tp();
  options.log = &log;
  testing::run_ranks(
      2,
      [](const ParallelState& state) {
        DescribedParams net;
        net.add("w", {4, 2}, {.placements = {{MeshAxis::tp, Shard{0}}}}).add("frozen", {2});
        net["frozen"].set_requires_grad(false);
        GradientSynchronizer(net, state, 1, 1).bind();
      },
      options);
  for (int64_t rank = 0; rank < 2; ++rank)
    EXPECT_EQ(testing::sent_by(log, rank), std::vector<std::string>({"all_gather [0 1] 8"}));
}

}  // namespace
}  // namespace lockstep
