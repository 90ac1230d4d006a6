#include "lockstep/pipeline/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <filesystem>
#include <set>
#include <thread>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/transfer.h"
#include "lockstep/tests/pipeline/toy_stages.h"
#include "lockstep/tests/support/allocation_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using namespace testing;  // NOLINT: the support of all tests
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

RankThreadOptions pipeline_of(int64_t ranks) {
  RankThreadOptions options;
  options.sizes.pipeline = ranks;
  return options;
}

PipelineExecutorOptions declared_shape(const ToyBatch& batch) {
  return {[batch](int64_t m) { return TensorShape{{batch.rows(m), kWidth}, at::kDouble}; }};
}

std::string text_of(const ScheduleOptions& options) {
  return std::string(to_string(options.family)) + ", P " + std::to_string(options.pipeline) +
         ", V " + std::to_string(options.virtual_pipeline) + ", M " +
         std::to_string(options.microbatches);
}

/// Every gradient and loss equals plain autograd's, bit for bit.
void expect_oracle(const ScheduleOptions& options, bool vary, bool declare) {
  SCOPED_TRACE(text_of(options));
  const ToyBatch batch{vary};
  const ToyOracle oracle(options.pipeline * options.virtual_pipeline, options.microbatches, batch);
  run_ranks(
      options.pipeline,
      [&](const ParallelState& state) {
        const int64_t rank = state.rank();
        const PipelineExecutor executor(
            state, make_schedule(options),
            declare ? declared_shape(batch) : PipelineExecutorOptions());
        ToyChunks chunks(rank, options.pipeline, options.virtual_pipeline, batch);
        executor.run(chunks.stages);
        for (size_t c = 0; c < chunks.layers.size(); ++c) {
          const auto& expected =
              oracle.layers[c * static_cast<size_t>(options.pipeline) + static_cast<size_t>(rank)];
          EXPECT_TRUE(at::equal(chunks.layers[c].weight.grad(), expected.weight.grad()))
              << "rank " << rank;
          EXPECT_TRUE(at::equal(chunks.layers[c].bias.grad(), expected.bias.grad()));
        }
        EXPECT_EQ(chunks.losses,
                  rank == options.pipeline - 1 ? oracle.losses : std::vector<double>());
      },
      pipeline_of(options.pipeline));
}

TEST(PipelineExecutorTest, EveryScheduleGivesTheGradientsOfOneProcessBitForBit) {
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const auto family :
         {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1})
      for (const int64_t microbatches : {1, 2, 3, 7})
        expect_oracle({.pipeline = ranks, .microbatches = microbatches, .family = family},
                      /*vary=*/false, /*declare=*/microbatches % 2 == 0);
}

TEST(PipelineExecutorTest, InterleavedSchedulesGiveTheGradientsOfOneProcessBitForBit) {
  for (const int64_t ranks : {2, 3, 4})
    for (const int64_t chunks : {2, 3})
      for (const int64_t microbatches : {ranks, 2 * ranks, 3 * ranks + 1})
        expect_oracle({.pipeline = ranks,
                       .virtual_pipeline = chunks,
                       .microbatches = microbatches,
                       .microbatch_group_size = microbatches % ranks == 0 ? ranks : 2 * ranks + 1},
                      /*vary=*/chunks == 2, /*declare=*/microbatches == ranks);
}

TEST(PipelineExecutorTest, LengthsMayVary) {
  for (const int64_t ranks : {2, 4})
    for (const auto family : {ScheduleFamily::one_f_one_b, ScheduleFamily::zb_h1})
      for (const bool declare : {false, true})
        expect_oracle({.pipeline = ranks, .microbatches = 9, .family = family}, /*vary=*/true,
                      declare);
}

TEST(PipelineExecutorTest, ForwardsAloneKeepNoGraphAndGoThroughAnyNumberOfMicroBatches) {
  for (const int64_t microbatches : {1, 3, 5}) {
    const ToyBatch batch{true};
    const ToyOracle oracle(4, microbatches, batch);
    run_ranks(
        2,
        [&](const ParallelState& state) {
          const PipelineExecutor executor(state, make_schedule({.pipeline = 2,
                                                                .virtual_pipeline = 2,
                                                                .microbatches = microbatches,
                                                                .forward_only = true}));
          ToyChunks chunks(state.rank(), 2, 2, batch);
          executor.run(chunks.stages);
          EXPECT_FALSE(chunks.layers[0].weight.grad().defined());
          EXPECT_EQ(chunks.losses, state.rank() == 1 ? oracle.losses : std::vector<double>());
        },
        pipeline_of(2));
  }
}

TEST(PipelineExecutorTest, WeightGradientsThatLayersDeferComeWithTheWeightTasks) {
  const PipelineSchedule schedule =
      make_schedule({.pipeline = 2, .microbatches = 3, .family = ScheduleFamily::zb_h1});
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const auto deferred = std::make_shared<DeferredGradients>();
        PipelineExecutorOptions options;
        options.deferred = deferred;
        const PipelineExecutor executor(state, schedule, options);
        std::string order;
        executor.run({[&](int64_t m, const at::Tensor& input) {
          order += "F" + std::to_string(m);
          const at::Tensor leaf = at::ones({2}, at::kDouble).requires_grad_(true);
          const at::Tensor output = input.defined() ? leaf * input : 2 * leaf;
          output.register_hook([&, m](const at::Tensor&) {
            order += deferred->deferring() ? "B" : "?";
            deferred->add([&, m] { order += "W" + std::to_string(m); });
          });
          return state.rank() == 0 ? output : output.sum();
        }});
        EXPECT_EQ(order, state.rank() == 0 ? "F0F1BW0F2BW1BW2" : "F0BF1BW0F2BW1W2");
      },
      pipeline_of(2));
}

TEST(PipelineExecutorTest, WhatAStepSends) {
  for (const bool declare : {true, false}) {
    CollectiveLog log;
    RankThreadOptions options = pipeline_of(3);
    options.log = &log;
    const ToyBatch batch;
    run_ranks(
        3,
        [&](const ParallelState& state) {
          const PipelineExecutor executor(
              state, make_schedule({.pipeline = 3, .microbatches = 4}),
              declare ? declared_shape(batch) : PipelineExecutorOptions());
          ToyChunks chunks(state.rank(), 3, 1, batch);
          executor.run(chunks.stages);
        },
        options);
    for (const int64_t rank : {0, 1, 2}) {
      int64_t sent = 0, received = 0, bytes = 0;
      for (const CollectiveRecord& record : log.of_rank(rank)) {
        EXPECT_EQ(record.group, "pp");
        (record.operation.starts_with("send") ? sent : received) += 1;
        bytes += record.bytes;
      }
      const int64_t neighbours = rank == 1 ? 2 : 1;
      const int64_t headers = declare ? 0 : 4;  // one for each activation
      EXPECT_EQ(sent, 4 * neighbours + (rank < 2 ? headers : 0)) << rank;
      EXPECT_EQ(received, 4 * neighbours + (rank > 0 ? headers : 0)) << rank;
      EXPECT_EQ(bytes, 2 * 4 * neighbours * 3 * kWidth * 8 + headers * 64 * neighbours) << rank;
    }
  }
}

std::atomic<int> live_outputs = 0;

struct Counters {
  int live = 0, peak = 0;
};

/// Lives in the graph of one micro-batch, as long as that graph.
struct Token : torch::CustomClassHolder {
  explicit Token(Counters* owner) : counters(owner) {
    counters->peak = std::max(counters->peak, ++counters->live);
  }
  ~Token() override { --counters->live; }
  Counters* counters;
};

/// input * weight, counting the live graphs and outputs.
struct Counted : torch::autograd::Function<Counted> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const at::Tensor& weight, int64_t counters) {
    context->save_for_backward({input, weight});
    context->saved_data["token"] = c10::IValue::make_capsule(
        c10::make_intrusive<Token>(reinterpret_cast<Counters*>(counters)));  // NOLINT
    const at::Tensor product = input * weight;
    ++live_outputs;
    auto* const data = new std::vector<double>(product.const_data_ptr<double>(),
                                               product.const_data_ptr<double>() + product.numel());
    return at::from_blob(
        data->data(), product.sizes(),
        [data](void*) {
          delete data;
          --live_outputs;
        },
        at::kDouble);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const variable_list saved = context->get_saved_variables();
    return {grads[0] * saved[1], grads[0] * saved[0], at::Tensor()};
  }
};

TEST(PipelineExecutorTest, LiveActivationsAreThoseOfThePlan) {
  for (const ScheduleOptions& options : std::vector<ScheduleOptions>{
           {.pipeline = 4, .microbatches = 12},
           {.pipeline = 4, .microbatches = 2},
           {.pipeline = 3, .microbatches = 5, .family = ScheduleFamily::gpipe},
           {.pipeline = 4, .microbatches = 12, .family = ScheduleFamily::zb_h1},
           {.pipeline = 2, .virtual_pipeline = 2, .microbatches = 6}}) {
    SCOPED_TRACE(text_of(options));
    const PipelineSchedule schedule = make_schedule(options);
    const std::vector<int64_t> plan = peak_live_microbatches(schedule);
    run_ranks(
        options.pipeline,
        [&](const ParallelState& state) {
          const PipelineExecutor executor(state, schedule);
          const auto rank = static_cast<size_t>(state.rank());
          Counters counters;
          const at::Tensor weight = toy_values(1, {kWidth}).requires_grad_(true);
          std::vector<PipelineStage> stages;
          for (int64_t c = 0; c < schedule.chunks; ++c)
            stages.push_back([&, c](int64_t m, const at::Tensor& input) {
              const at::Tensor hidden =
                  Counted::apply(input.defined() ? input : toy_values(m, {2, kWidth}), weight,
                                 reinterpret_cast<int64_t>(&counters));  // NOLINT
              const bool last = state.rank() == schedule.pipeline() - 1 && c + 1 == schedule.chunks;
              return last ? hidden.sum() : hidden;
            });
          executor.run(stages);
          EXPECT_EQ(counters.peak, plan[rank]) << "rank " << rank;
          EXPECT_EQ(counters.live, 0);
        },
        pipeline_of(options.pipeline));
    EXPECT_EQ(live_outputs, 0);
  }
}

TEST(PipelineExecutorTest, AnOutputThatWasSentIsFreed) {
  constexpr int64_t kMicrobatches = 8;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2,
                                                              .microbatches = kMicrobatches,
                                                              .family = ScheduleFamily::gpipe}));
        Counters counters;
        const at::Tensor weight = toy_values(1, {kWidth}).requires_grad_(true);
        executor.run({[&](int64_t m, const at::Tensor& input) {
          if (state.rank() == 0)
            return Counted::apply(toy_values(m, {2, kWidth}), weight,
                                  reinterpret_cast<int64_t>(&counters));  // NOLINT
          if (m + 1 == kMicrobatches)  // all have arrived, no backward has run
            for (int i = 0; i < 1000 && live_outputs > 0; ++i)
              std::this_thread::sleep_for(std::chrono::milliseconds(5));
          EXPECT_TRUE(m + 1 < kMicrobatches || live_outputs == 0);
          return (input * weight).sum();
        }});
      },
      pipeline_of(2));
}

std::set<std::string> threads_of_this_process() {
  std::set<std::string> ids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task"))
    ids.insert(entry.path().filename());
  return ids;
}

/// c10d keeps 134 bytes for each thread that has ever waited for a message.
TEST(PipelineExecutorTest, RunsStartNoThreadAfterTheFirst) {
  constexpr int kRuns = 6;
  std::vector<std::set<std::string>> seen(kRuns);
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 4}));
        ToyChunks chunks(state.rank(), 2, 1, {});
        for (auto& threads : seen) {
          executor.run({[&](int64_t m, const at::Tensor& input) {
            const at::Tensor output = chunks.stages[0](m, input);
            // Both ranks have sent by then.
            if (state.rank() == 1 && m == 3) threads = threads_of_this_process();
            return output;
          }});
          all_reduce(state.world(), at::zeros({1}), ReduceOp::sum, "end of the run").wait();
        }
      },
      pipeline_of(2));
  for (int run = 2; run < kRuns; ++run) EXPECT_EQ(seen[run], seen[1]) << "run " << run;
}

TEST(PipelineExecutorTest, AStageThatThrowsEndsAllRanksSoon) {
  const auto begin = std::chrono::steady_clock::now();
  const auto errors = errors_of_ranks(
      4,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 4, .microbatches = 8}));
        ToyChunks chunks(state.rank(), 4, 1, {});
        executor.run({[&](int64_t m, const at::Tensor& input) {
          if (state.rank() == 2 && m == 3) throw std::runtime_error("the stage broke");
          return chunks.stages[0](m, input);
        }});
      },
      pipeline_of(4));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(15));
  EXPECT_EQ(errors[2], "the stage broke");
  for (const size_t rank : {0, 1, 3})
    EXPECT_NE(errors[rank].find("rank 2: the stage broke"), std::string::npos) << errors[rank];
}

TEST(PipelineExecutorTest, RefusesByName) {
  const ParallelState state = ParallelState::single_process();
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { PipelineExecutor(state, make_schedule({.pipeline = 2, .microbatches = 2})); },
      "found one for 2 ranks, allowed: 1"));
  PipelineSchedule schedule = make_schedule({.microbatches = 2});
  std::swap(schedule.ranks[0][0], schedule.ranks[0][1]);
  EXPECT_TRUE(throws_with<UsageError>([&] { PipelineExecutor(state, schedule); }, "B0.0"));
  const PipelineExecutor executor(state, make_schedule({.microbatches = 2}));
  EXPECT_TRUE(throws_with<UsageError>([&] { executor.run({}); }, "found 0 stages"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { executor.run({[](int64_t, const at::Tensor&) { return at::Tensor(); }}); },
      "returned nothing"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] { executor.run({[](int64_t, const at::Tensor&) { return at::ones({2}); }}); },
      "the loss has 2 elements"));
}

TEST(PipelineExecutorTest, AnOutputThatForgetsItsInputIsRefused) {
  const auto errors = errors_of_ranks(
      2,
      [&](const ParallelState& state) {
        const PipelineExecutor executor(state, make_schedule({.pipeline = 2, .microbatches = 1}));
        const at::Tensor weight = at::ones({kWidth}, at::kDouble).requires_grad_(true);
        executor.run({[&](int64_t m, const at::Tensor& input) {
          return state.rank() == 0 ? weight * toy_values(m, {kWidth})
                                   : (weight * input.detach()).sum();
        }});
      },
      pipeline_of(2));
  EXPECT_NE(errors[1].find("chunk 0 of rank 1: the output does not depend on the input"),
            std::string::npos)
      << errors[1];
}

TEST(Transfer, NoTextOfALabelIsMadeInAStep) {
  run_ranks(2, [](const ParallelState& state) {
    const ProcessGroup group = state.world();
    const TransferLabel label(std::string(kLongText, 'n'));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor sent = at::full({2, 3}, step, at::kDouble);
      allocations = {};
      if (state.rank() == 0) {
        SendQueue queue;
        queue.send_with_shape(group, sent, 1, label);
        queue.send(group, sent, 1, label);
        queue.finish();
      } else {
        const TensorShape shape = {{2, 3}, at::kDouble};
        EXPECT_TRUE(at::equal(IncomingTensor(group, at::kCPU, 0, label).take(), sent));
        EXPECT_TRUE(at::equal(IncomingTensor(group, at::kCPU, shape, 0, label).take(), sent));
      }
      // The group keeps both texts.
      EXPECT_EQ(allocations.long_texts, step == 0 ? 2 : 0) << "step " << step;
    }
  });
}

}  // namespace
}  // namespace lockstep
