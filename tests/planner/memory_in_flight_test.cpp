// The planned memory of pipelines, against the schedules' own lists of tasks.

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>

#include "lockstep/planner/activation_plan.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/pipeline_plan.h"
#include "lockstep/tests/planner/planned_models.h"

namespace lockstep {
namespace {

using testing::small;
using testing::text_of;
using testing::with;

/// The most micro-batches that the tasks of `stage` keep at a time, in one chunk or in all.
int64_t most_in_flight(const PipelineSchedule& schedule, int64_t stage,
                       std::optional<int64_t> chunk = {}) {
  const TaskKind last = schedule.split_backward ? TaskKind::weight : TaskKind::backward;
  int64_t now = 0, most = 0;
  for (const PipelineTask& task : schedule.ranks.at(static_cast<size_t>(stage))) {
    if (chunk && task.chunk != *chunk) continue;
    if (task.kind == TaskKind::forward) most = std::max(most, ++now);
    if (task.kind == last) --now;
  }
  return most;
}

TEST(MemoryInFlight, IsThatOfTheTasks) {
  const auto expect_pieces = [](const std::vector<std::string>& overrides,
                                const std::vector<int64_t>& pieces) {
    SCOPED_TRACE(text_of(overrides));
    const Config config =
        small(with({"parallel.pipeline_model_parallel_size=3", "model.num_layers=6"}, overrides));
    const auto schedule =
        make_schedule(schedule_options(config, *config.train.global_batch_size / 3));
    for (int64_t stage = 0; stage < 3; ++stage) {
      int64_t bytes = 0, layers = 0, working = 0, number = 0;
      for (const ModelChunk& chunk : chunks_of_stage(config, stage)) {
        const ActivationPlan plan = plan_activations(config, chunk, chunk.first_layer);
        layers = std::max(layers, plan.layers);
        working = std::max(working, plan.working);
        bytes += rotary_table_bytes(config, chunk);
        bytes += most_in_flight(schedule, stage, number++) * plan.ends;
      }
      const int64_t in_flight = pieces.at(static_cast<size_t>(stage));
      EXPECT_EQ(most_in_flight(schedule, stage), in_flight);
      EXPECT_EQ(plan_memory(config).stages.at(static_cast<size_t>(stage)).activation_bytes,
                bytes + in_flight * layers + working)
          << stage;
    }
  };
  const std::string ten = "train.global_batch_size=30", two = "train.global_batch_size=6";
  const std::string gpipe = "parallel.pipeline_schedule=gpipe";
  const std::string zero_bubble = "parallel.pipeline_schedule=zb-h1";
  expect_pieces({ten}, {3, 2, 1});
  expect_pieces({two}, {2, 2, 1});
  expect_pieces({ten, gpipe}, {10, 10, 10});
  expect_pieces({ten, zero_bubble}, {3, 3, 3});
  expect_pieces({two, zero_bubble}, {2, 2, 2});
  const std::string chunks = "parallel.virtual_pipeline_model_parallel_size=2";
  expect_pieces({"train.global_batch_size=36", chunks}, {8, 6, 4});
  const std::string groups = "parallel.microbatch_group_size_per_vp_stage=";
  expect_pieces({ten, chunks, groups + "5"}, {10, 8, 6});
  // The last group has 3 micro-batches, and the last stage keeps the logits of all of them.
  const std::string eight = "train.global_batch_size=24", nine = "train.global_batch_size=27";
  expect_pieces({eight, chunks, groups + "5"}, {10, 8, 6});
  expect_pieces({nine, chunks, groups + "6"}, {11, 9, 7});
  expect_pieces({eight, "model.num_layers=9", "parallel.virtual_pipeline_model_parallel_size=3",
                 groups + "5"},
                {15, 13, 11});
}

TEST(MemoryInFlight, LogitsOfAllMicrobatchesInFlightCount) {
  const auto logits_on_last = [](const std::string& schedule, const std::string& batch) {
    const Config config =
        small({"parallel.pipeline_model_parallel_size=3", "model.vocab_size=30000", schedule,
               "train.global_batch_size=" + batch});
    const double logits = 40.0 * 3 * 30000 * 4;
    return static_cast<double>(plan_memory(config).stages.at(2).activation_bytes) / logits;
  };
  const std::string one_f_one_b = "parallel.pipeline_schedule=1f1b";
  const std::string gpipe = "parallel.pipeline_schedule=gpipe";
  const std::string zero_bubble = "parallel.pipeline_schedule=zb-h1";
  EXPECT_NEAR(logits_on_last(one_f_one_b, "24"), 1, 0.1);
  EXPECT_NEAR(logits_on_last(gpipe, "24"), 8, 0.8);
  EXPECT_NEAR(logits_on_last(zero_bubble, "24"), 3, 0.3);
  EXPECT_NEAR(logits_on_last(zero_bubble, "6"), 2, 0.2);
}

TEST(MemoryInFlight, StagesReceiveFromBothSides) {
  const auto messages = [](const std::vector<std::string>& overrides) {
    const int64_t one = 40 * 3 * 48 * 4;  // an activation
    std::vector<int64_t> counts;
    for (const StageMemory& stage :
         plan_memory(small(with({"parallel.pipeline_model_parallel_size=3", "model.num_layers=6",
                                 "train.global_batch_size=36"},
                                overrides)))
             .stages)
      counts.push_back(stage.communication_bytes / one);
    return counts;
  };
  EXPECT_EQ(messages({}), (std::vector<int64_t>{1, 2, 1}));
  // Between chunks the last stage sends to the first one.
  EXPECT_EQ(messages({"parallel.virtual_pipeline_model_parallel_size=2"}),
            (std::vector<int64_t>{2, 2, 2}));
}

}  // namespace
}  // namespace lockstep
