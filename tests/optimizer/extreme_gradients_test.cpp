// Gradients that are infinite on only one rank, and finite ones whose squares overflow.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/clip_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/optimizer/unscale_grads.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();

DistributedDataParallelConfig averaging(bool sharded) {
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  config.use_distributed_optimizer = sharded;
  return config;
}

std::unique_ptr<Optimizer> optimizer_of(DistributedDataParallel& ddp, double lr, double clip,
                                        bool sharded) {
  OptimizerConfig config;
  config.optimizer = OptimizerKind::sgd;
  config.lr = lr;
  config.sgd_momentum = config.weight_decay = 0;
  config.clip_grad = clip;
  if (sharded) return std::make_unique<DistributedOptimizer>(std::vector{&ddp}, config);
  return std::make_unique<Optimizer>(std::vector{&ddp}, config);
}

/// One step of a parameter that all tensor-parallel ranks hold, with the gradient `value` on rank
/// `at_fault`. Returns for each rank whether it skipped the step and left its parameters unchanged.
std::vector<int> skipped_on(int64_t world, int64_t tensor, int64_t at_fault, double value,
                            at::ScalarType dtype, bool sharded) {
  std::vector<int> skipped(static_cast<size_t>(world), -1);
  testing::RankThreadOptions options;
  options.sizes.tensor = tensor;
  testing::run_ranks(
      world,
      [&](const ParallelState& state) {
        const at::Tensor norm = at::ones({4}, dtype).requires_grad_(true);
        const at::Tensor cut = at::ones({4}, dtype).requires_grad_(true);
        ParamDescription of_cut;
        of_cut.placements[MeshAxis::tp] = Shard{0};
        DistributedDataParallel ddp({{"norm", norm, {}}, {"cut", cut, of_cut}}, state,
                                    averaging(sharded));
        const auto optimizer = optimizer_of(ddp, 0.5, 0, sharded);
        const double factor = state.rank() == at_fault ? value : 1;
        (norm * factor + cut).sum().backward();
        finalize_model_grads({&ddp});
        EXPECT_EQ(found_inf({&ddp}), !std::isfinite(value));
        const Optimizer::StepResult result = optimizer->step();
        ddp.finish_param_sync();
        EXPECT_EQ(std::isfinite(result.grad_norm), std::isfinite(value));
        const bool unchanged = norm.eq(1).all().item<bool>() && cut.eq(1).all().item<bool>();
        EXPECT_EQ(unchanged, result.skipped) << "rank " << state.rank();
        skipped[static_cast<size_t>(state.rank())] = result.skipped ? 1 : 0;
      },
      options);
  return skipped;
}

TEST(ExtremeGradients, AnInfinityOnAnyReplicaOfATensorParallelGroupSkipsTheStepOnAll) {
  for (const bool sharded : {false, true})
    for (const at::ScalarType dtype : {at::kFloat, at::kDouble, at::kBFloat16})
      for (const int64_t world : {2, 4})
        for (int64_t at_fault = 0; at_fault < world; ++at_fault)
          for (const double value : {kInfinite, std::nan("")})
            EXPECT_EQ(skipped_on(world, 2, at_fault, value, dtype, sharded),
                      std::vector<int>(static_cast<size_t>(world), 1))
                << at::toString(dtype) << ", rank " << at_fault << " of " << world
                << (sharded ? ", sharded" : "");
}

TEST(ExtremeGradients, FiniteGradientsOfAllReplicasSkipNothing) {
  for (const bool sharded : {false, true})
    EXPECT_EQ(skipped_on(2, 2, 1, 1, at::kFloat, sharded), std::vector<int>(2, 0));
}

TEST(ExtremeGradients, TheNormOfFiniteGradientsWhoseSquaresOverflowIsFinite) {
  for (const bool sharded : {false, true}) {
    testing::RankThreadOptions options;
    options.sizes.tensor = 2;
    testing::run_ranks(
        4,
        [&](const ParallelState& state) {
          const at::Tensor cut = at::ones({3}, at::kDouble).requires_grad_(true);
          const at::Tensor whole = at::zeros({2}, at::kDouble).requires_grad_(true);
          ParamDescription of_cut;
          of_cut.placements[MeshAxis::tp] = Shard{0};
          DistributedDataParallel ddp({{"whole", whole, {}}, {"cut", cut, of_cut}}, state,
                                      averaging(sharded));
          const auto optimizer = optimizer_of(ddp, 1, 1, sharded);
          const double large = state.rank() % 2 == 0 ? 3e200 : 1e10;
          ((cut * large).sum() + (whole * 4e200).sum()).backward();
          finalize_model_grads({&ddp});
          EXPECT_FALSE(found_inf({&ddp}));
          const double wanted = std::sqrt(3 * 9. + 2 * 16.) * 1e200;
          EXPECT_NEAR(grad_norm({&ddp}).item<double>() / wanted, 1, 1e-15);
          const Optimizer::StepResult result = optimizer->step();
          ddp.finish_param_sync();
          EXPECT_FALSE(result.skipped);
          EXPECT_NEAR(result.grad_norm / wanted, 1, 1e-15);
          EXPECT_NEAR(whole[0].item<double>(), -4e200 / wanted, 1e-15);
        },
        options);
  }
}

TEST(ExtremeGradients, AnInfinityBesideThemIsStillSeen) {
  const ParallelState alone = ParallelState::single_process();
  const at::Tensor weight = at::ones({3}, at::kDouble).requires_grad_(true);
  DistributedDataParallel ddp({{"weight", weight, {}}}, alone, averaging(false));
  const at::Tensor factors = at::tensor({1e200, kInfinite, 1.}, at::kDouble);
  (weight * factors).sum().backward();
  finalize_model_grads({&ddp});
  EXPECT_TRUE(found_inf({&ddp}));
  EXPECT_FALSE(std::isfinite(grad_norm({&ddp}).item<double>()));
}

/// The calls of rank 0 for the norm.
std::vector<std::string> calls_for_norm(double value, at::ScalarType dtype) {
  testing::CollectiveLog log;
  testing::RankThreadOptions options;
  options.sizes.tensor = 2;
  options.log = &log;
  std::vector<std::string> calls;
  testing::run_ranks(
      2,
      [&](const ParallelState& state) {
        const at::Tensor weight = at::ones({3}, dtype).requires_grad_(true);
        DistributedDataParallel ddp({{"weight", weight, {}}}, state, averaging(false));
        (weight * value).sum().backward();
        finalize_model_grads({&ddp});
        const size_t before = log.of_rank(state.rank()).size();
        grad_norm({&ddp});
        const auto all = log.of_rank(state.rank());
        if (state.rank() == 0)
          for (size_t i = before; i < all.size(); ++i)
            calls.push_back(all[i].operation + " of " + all[i].label + ", " +
                            std::to_string(all[i].bytes));
      },
      options);
  return calls;
}

TEST(ExtremeGradients, OnlyANormThatOverflowsIsComputedTwice) {
  const std::string norm = "all_reduce (sum) of gradient norm, 8";
  const std::string largest = "all_reduce (max) of largest gradient, 8";
  using Calls = std::vector<std::string>;
  EXPECT_EQ(calls_for_norm(2, at::kDouble), Calls{norm});
  EXPECT_EQ(calls_for_norm(std::nan(""), at::kFloat), Calls{norm});
  EXPECT_EQ(calls_for_norm(kInfinite, at::kFloat), (Calls{norm, largest}));
  EXPECT_EQ(calls_for_norm(1e200, at::kDouble), (Calls{norm, largest, norm}));
}

}  // namespace
}  // namespace lockstep
