// Programs in which most micro-batches repeat what others did, against those in which each one ran.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/planned_job.h"

namespace lockstep {
namespace {

using namespace testing;

/// Expects the same programs; returns the number of tasks that were repeated.
int64_t expect_the_same(int64_t world, const Overrides& overrides) {
  SCOPED_TRACE(fmt::format("{} ranks, {}", world, fmt::join(overrides, " ")));
  const Config config = config_of(with({"train.global_batch_size=12"}, overrides));
  const JobProgram few = record_job(config, world, /*kernels=*/true);
  const JobProgram all = record_job(config, world, /*kernels=*/true, PlannedTasks::all);
  EXPECT_EQ(few.program_of, all.program_of);
  int64_t repeated = 0;
  for (size_t i = 0; i < all.programs.size(); ++i) {
    const RankProgram &one = few.programs[i], &other = all.programs[i];
    SCOPED_TRACE(fmt::format("rank {}", other.rank));
    EXPECT_EQ(one.rank, other.rank);
    EXPECT_EQ(one.calls, other.calls);
    EXPECT_EQ(one.kernels, other.kernels);
    EXPECT_EQ(one.events, other.events);
    EXPECT_EQ(one.step_ends, other.step_ends);
    EXPECT_EQ(one.peak_bytes, other.peak_bytes);
    EXPECT_EQ(other.repeated_tasks, 0);
    repeated += one.repeated_tasks;
  }
  return repeated;
}

TEST(RepeatedTasks, AllMicrobatchesButFourAreRepeated) {
  // Two steps of 12 micro-batches, forward and backward, and the forwards of a validation.
  EXPECT_EQ(expect_the_same(1, {}), 5 * (12 - 4));
  EXPECT_EQ(expect_the_same(1, {"train.micro_batch_size=3"}), 0) << "4 micro-batches";
  EXPECT_EQ(expect_the_same(2, layout({kPipeline})), 2 * 5 * (12 - 4));
  EXPECT_EQ(expect_the_same(2, layout({kPipeline, kVirtual})), 2 * 2 * 5 * (12 - 4));
}

TEST(RepeatedTasks, EveryLayoutThatRepeatsRecordsTheSame) {
  const std::vector<std::pair<int64_t, Overrides>> jobs = {
      {4, layout({"pipeline_model_parallel_size=4"})},
      {2, layout({kPipeline, "pipeline_schedule=gpipe"})},
      {2, layout({kTensor, kSequence})},
      {2, layout({kTensor, kSequence, kOverlap})},
      {2, layout({kContext})},
      {2, layout({kContext, "cp_comm_type=a2a"})},
      {4, with(layout({kPipeline, kTensor}), kSharded)},
      {4, with(layout({kPipeline, kVirtual}), {"ddp.overlap_grad_reduce=true"})},
      {4, with(with(layout({kPipeline, kVirtual}), kSharded), {"ddp.overlap_grad_reduce=true"})},
      {2, with(layout({kExpert}), kExperts)},
      {4, with(layout({kExpert, kPipeline}),
               with(kExperts, {"model.moe_token_dispatcher_type=allgather"}))},
      {2, with(layout({kPipeline}), {"model.recompute_granularity=full",
                                     "model.recompute_method=uniform", "train.precision=bf16"})},
      {2, with(layout({kPipeline}), {"model.hidden_dropout=0.1", "model.attention_dropout=0.1"})},
      {2, with(layout({kPipeline}), {"ddp.calculate_per_token_loss=false"})},
      {2, with(layout({kPipeline}), {"train.device=cpu"})},
      {2, with(layout({kPipeline}), {"lora.rank=2"})}};
  for (const auto& [world, overrides] : jobs)
    EXPECT_GT(expect_the_same(world, overrides), 0) << fmt::format("{}", fmt::join(overrides, " "));
}

TEST(RepeatedTasks, WorkThatSpansMicrobatchesIsNotRepeated) {
  // Each backward waits for what the one before reduces; W tasks come between backwards.
  const Overrides grads = {"ddp.data_parallel_sharding_strategy=optim_grads"};
  const Overrides parameters = {"ddp.data_parallel_sharding_strategy=optim_grads_params"};
  expect_the_same(2, with(kSharded, grads));
  expect_the_same(2, with(kSharded, parameters));
  expect_the_same(4, with(layout({kPipeline}), with(kSharded, parameters)));
  expect_the_same(4,
                  with(layout({kPipeline, "pipeline_schedule=gpipe"}), with(kSharded, parameters)));
  EXPECT_EQ(expect_the_same(2, layout({kPipeline, "pipeline_schedule=zb-h1"})), 0);
}

}  // namespace
}  // namespace lockstep
