// Which backward of a schedule reduces the gradients of a chunk, and in which order they are added.

#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/tests/pipeline/toy_stages.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::ToyBatch;
using testing::ToyChunks;
using testing::ToyOracle;

constexpr int64_t kDataParallel = 2;

/// "B1.0": the backward of micro-batch 1 through chunk 0 begins; "sync 0": the reduction of buckets
/// of chunk 0 starts; "end" of the schedule.
using Events = std::vector<std::string>;

/// Runs the schedule once, with each chunk in a wrapper of its own. Returns the events of the first
/// data-parallel rank of each stage.
std::vector<Events> events_of_stages(const ScheduleOptions& options) {
  const int64_t stages = options.pipeline, chunks = options.virtual_pipeline;
  std::vector<Events> events(static_cast<size_t>(stages * kDataParallel));
  const auto note = [&](int64_t rank, const std::string& event) {
    Events& own = events[static_cast<size_t>(rank)];
    if (own.empty() || own.back() != event) own.push_back(event);
  };
  testing::RankThreadOptions threads;
  threads.sizes.pipeline = stages;
  threads.observer = [&](const CollectiveRecord& call) {
    const size_t chunk = call.label.find("'chunk ");
    if (call.label.starts_with("bucket") && chunk != std::string::npos)
      note(call.rank, std::string("sync ") + call.label[chunk + 7]);
  };
  const ToyOracle oracle(stages * chunks, options.microbatches, {});
  run_ranks(
      stages * kDataParallel,
      [&](const ParallelState& state) {
        const int64_t stage = state.group(GroupKind::pp).rank();
        ToyChunks toy(stage, stages, chunks, {});
        DistributedDataParallelConfig config;
        config.overlap_grad_reduce = true;
        std::vector<std::unique_ptr<DistributedDataParallel>> wrappers;
        std::vector<PipelineStage> noted;
        for (size_t c = 0; c < toy.layers.size(); ++c) {
          const std::string name = "chunk " + std::to_string(c);
          const at::Tensor &weight = toy.layers[c].weight, &bias = toy.layers[c].bias;
          wrappers.push_back(std::make_unique<DistributedDataParallel>(
              std::vector<NamedParameter>{{name + " weight", weight, default_description(weight)},
                                          {name + " bias", bias, default_description(bias)}},
              state, config));
          wrappers.back()->zero_grad_buffer();
          wrappers.back()->set_num_microbatches(options.microbatches);
          noted.push_back([&, c](int64_t m, const at::Tensor& input) {
            const at::Tensor output = toy.stages[c](m, input);
            output.register_hook([&note, &state, c, m](const at::Tensor&) {
              note(state.rank(), "B" + std::to_string(m) + "." + std::to_string(c));
            });
            return output;
          });
        }
        PipelineExecutor(state, make_schedule(options)).run(noted);
        note(state.rank(), "end");
        for (size_t c = 0; c < wrappers.size(); ++c) {
          wrappers[c]->finish_grad_sync();
          const auto& whole =
              oracle.layers[c * static_cast<size_t>(stages) + static_cast<size_t>(stage)];
          EXPECT_TRUE(at::equal(toy.layers[c].weight.grad(), 2 * whole.weight.grad())) << c;
          EXPECT_TRUE(at::equal(toy.layers[c].bias.grad(), 2 * whole.bias.grad())) << c;
        }
      },
      threads);
  std::vector<Events> firsts;
  for (int64_t stage = 0; stage < stages; ++stage)
    firsts.push_back(events[static_cast<size_t>(stage * kDataParallel)]);
  return firsts;
}

/// The calls of a schedule that uses no_sync() to the same effect.
Events as_no_sync(const Events& events) {
  Events words = {"enter no_sync"};
  for (size_t i = 0; i + 1 < events.size(); ++i) {
    if (!events[i].starts_with("B")) continue;
    if (events[i + 1].starts_with("sync")) words.emplace_back("exit no_sync");
    words.emplace_back("backward");
  }
  return words;
}

// Megatron Core's executor leaves no_sync() before the last backward. Ours counts the backwards.
TEST(PipelineGradientSync, G92TheFirstStageLeavesNoSyncBeforeItsLastBackward) {
  EXPECT_EQ(as_no_sync(events_of_stages({.pipeline = 2, .microbatches = 1})[0]),
            (Events{"enter no_sync", "exit no_sync", "backward"}));
  EXPECT_EQ(
      as_no_sync(events_of_stages({.pipeline = 2, .microbatches = 4})[0]),
      (Events{"enter no_sync", "backward", "backward", "backward", "exit no_sync", "backward"}));
}

TEST(PipelineGradientSync, EveryStageReducesInTheLastBackwardOfEachChunk) {
  const Events in_order = {"B0.0", "B1.0", "B2.0", "sync 0", "end"};
  for (const auto family :
       {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1})
    EXPECT_EQ(events_of_stages({.pipeline = 3, .microbatches = 3, .family = family}),
              (std::vector<Events>{in_order, in_order, in_order}));
  EXPECT_EQ(events_of_stages({.pipeline = 2, .virtual_pipeline = 2, .microbatches = 4})[0],
            (Events{"B0.1", "B1.1", "B0.0", "B1.0", "B2.1", "B3.1", "sync 1", "B2.0", "B3.0",
                    "sync 0", "end"}));
}

TEST(GradientOrder, IsThatOfTheBackwardTasks) {
  constexpr int64_t kRanks = 2, kMicrobatches = 4;
  PipelineSchedule schedule = make_schedule(
      {.pipeline = kRanks, .microbatches = kMicrobatches, .family = ScheduleFamily::gpipe});
  for (auto& tasks : schedule.ranks) std::reverse(tasks.begin() + kMicrobatches, tasks.end());
  const ToyBatch batch;
  const ToyOracle in_order(kRanks, kMicrobatches, batch);
  const ToyOracle reversed(kRanks, kMicrobatches, batch, /*reversed=*/true);
  testing::RankThreadOptions threads;
  threads.sizes.pipeline = kRanks;
  run_ranks(
      kRanks,
      [&](const ParallelState& state) {
        const auto rank = static_cast<size_t>(state.rank());
        const PipelineExecutor executor(state, schedule);
        ToyChunks chunks(state.rank(), kRanks, 1, batch);
        executor.run(chunks.stages);
        const at::Tensor found = chunks.layers[0].weight.grad();
        EXPECT_TRUE(at::equal(found, reversed.layers[rank].weight.grad()));
        EXPECT_FALSE(at::equal(found, in_order.layers[rank].weight.grad()));
      },
      threads);
}

}  // namespace
}  // namespace lockstep
