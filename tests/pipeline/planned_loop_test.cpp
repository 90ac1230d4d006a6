// Loops over a pipeline under verify() and verify_collectives().

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/pipeline/toy_stages.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

constexpr int64_t kLoopMicrobatches = 6;

/// A loop like that of examples/own_schedule. Micro-batches have different numbers of rows; unless
/// it `declares` them, each stage learns them from the one before. With `tied` the first and the
/// last stage have copies of a parameter.
struct PlannedLoop {
  ScheduleFamily family = ScheduleFamily::one_f_one_b;
  bool declares = false, forward_only = false, tied = false;

  /// One step of training, or of evaluation.
  void operator()(const ParallelState& state) const {
    const ProcessGroup pp = state.group(GroupKind::pp);
    const int64_t replica = state.group(GroupKind::dp).rank();
    const testing::ToyBatch batch{true};
    testing::ToyChunks toy(pp.rank(), pp.size(), 1, batch);
    const at::Tensor &weight = toy.layers[0].weight, &bias = toy.layers[0].bias;
    std::vector<NamedParameter> params = {{"weight", weight, default_description(weight)},
                                          {"bias", bias, default_description(bias)}};
    at::Tensor table;
    if (tied && (pp.rank() == 0 || pp.rank() == pp.size() - 1)) {
      table = testing::toy_values(7, {testing::kWidth, testing::kWidth}).requires_grad_(true);
      params.push_back({"table", table, default_description(table)});
      params.back().description.tie = Tie{"table"};
    }
    DistributedDataParallel ddp(params, state);
    ddp.set_num_microbatches(kLoopMicrobatches);
    ddp.zero_grad();
    OptimizerConfig config;
    config.lr = 0.01;
    Optimizer optimizer({&ddp}, config);
    const PipelineExecutor executor(state, schedule(pp.size()), options(batch, replica));
    executor.run({[&](int64_t m, const at::Tensor& hidden) {
      const at::Tensor input = hidden.defined() ? hidden : batch.input(m + replica);
      EXPECT_EQ(input.size(0), batch.rows(m + replica));
      return toy.stages[0](m + replica, table.defined() ? at::matmul(input, table) : input);
    }});
    if (!forward_only) {
      finalize_model_grads({&ddp}, at::full({}, kLoopMicrobatches));
      optimizer.step();
    }
    at::Tensor loss = at::zeros({}, at::kDouble);
    all_reduce(pp, loss, ReduceOp::sum, "loss").wait();
  }

  PipelineSchedule schedule(int64_t stages) const {
    return make_schedule({.pipeline = stages,
                          .microbatches = kLoopMicrobatches,
                          .family = family,
                          .forward_only = forward_only});
  }

  PipelineExecutorOptions options(const testing::ToyBatch& batch, int64_t replica) const {
    PipelineExecutorOptions chosen;
    if (declares)
      chosen.activation_shape = [batch, replica](int64_t m) {
        return TensorShape{{batch.rows(m + replica), testing::kWidth}, at::kDouble};
      };
    return chosen;
  }
};

void expect_verified(const PlannedLoop& loop, int64_t stages, int64_t replicas) {
  SCOPED_TRACE(std::to_string(stages) + " stages, " + std::to_string(replicas) + " replicas, " +
               to_string(loop.family));
  const ParallelSizes sizes = {.world_size = stages * replicas, .pipeline = stages};
  EXPECT_EQ(verify_collectives(sizes, loop), std::nullopt);
  const OrderVerdict verdict = verify(loop, sizes);
  EXPECT_TRUE(verdict.ok()) << verdict.to_string();
  EXPECT_GT(verdict.num_operations, 0);
}

TEST(PlannedLoop, FindsTheShapesThatRanksSendEachOther) {
  for (const int64_t stages : {2, 4})
    for (const int64_t replicas : {1, 2})
      for (const auto family : {ScheduleFamily::one_f_one_b, ScheduleFamily::zb_h1})
        for (const bool declares : {false, true})
          expect_verified({.family = family, .declares = declares}, stages, replicas);
  expect_verified({.forward_only = true}, 4, 2);
}

TEST(PlannedLoop, IsOneThatRuns) {
  testing::run_ranks(4, PlannedLoop{}, {.sizes = {.pipeline = 2}});
  testing::run_ranks(4, PlannedLoop{.tied = true}, {.sizes = {.pipeline = 4}});
}

// Stages in the middle report no copy, with a text of length 0.
TEST(PlannedLoop, ATableMayBeTiedOverTheFirstAndTheLastStage) {
  for (const int64_t stages : {2, 4}) expect_verified({.tied = true}, stages, 1);
}

TEST(PlannedLoop, AStageThatReceivesLessIsFound) {
  const auto difference =
      verify_collectives({.world_size = 2, .pipeline = 2}, [](const ParallelState& state) {
        PlannedLoop{}(state);
        const ProcessGroup pp = state.group(GroupKind::pp);
        SendQueue queue;
        if (pp.rank() == 0)
          queue.send_with_shape(pp, at::ones({2}), 1, TransferLabel("a remainder"));
        queue.finish();
      });
  EXPECT_NE(difference.value_or("").find("shape of a remainder"), std::string::npos);
  EXPECT_NE(difference.value_or("").find("nothing is received"), std::string::npos);
}

TEST(PlannedLoop, WithSeveralChunksShapesMustBeDeclared) {
  const auto verified = [](const PipelineExecutorOptions& options) {
    return verify_collectives({.world_size = 2, .pipeline = 2}, [&](const ParallelState& state) {
      const PipelineExecutor executor(
          state, make_schedule({.pipeline = 2, .virtual_pipeline = 2, .microbatches = 4}), options);
      testing::ToyChunks chunks(state.rank(), 2, 2, {});
      executor.run(chunks.stages);
    });
  };
  EXPECT_TRUE(testing::throws_with<Error>(
      [&] { verified({}); },
      "planning rank 0 of 2: a planning rank cannot know the shape of input of F0.1 of pipeline "
      "rank 0: set PipelineExecutorOptions::activation_shape"));
  const testing::ToyBatch batch;
  EXPECT_EQ(verified({[batch](int64_t m) {
              return TensorShape{{batch.rows(m), testing::kWidth}, at::kDouble};
            }}),
            std::nullopt);
}

}  // namespace
}  // namespace lockstep
