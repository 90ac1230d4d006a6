#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/pipeline/executor.h"
#include "lockstep/tests/support/rank_threads.h"

// The executor's record of a run, and transfers that overlap tasks.

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;

constexpr int64_t kNumel = 1 << 22;

/// A run over two ranks. Forwards and backwards take 20 ms, activations have 16 MiB.
std::shared_ptr<PipelineTrace> traced_run(const ScheduleOptions& options) {
  const auto trace = std::make_shared<PipelineTrace>();
  testing::RankThreadOptions threads;
  threads.sizes.pipeline = options.pipeline;
  testing::run_ranks(
      options.pipeline,
      [&](const ParallelState& state) {
        PipelineExecutorOptions executor_options;
        executor_options.activation_shape = [](int64_t) {
          return TensorShape{{kNumel}, at::kFloat};
        };
        executor_options.trace = trace;
        const PipelineExecutor executor(state, make_schedule(options), executor_options);
        const at::Tensor leaf = at::ones({kNumel}).requires_grad_(true);
        executor.run({[&](int64_t, const at::Tensor& input) {
          const auto rest = [] { std::this_thread::sleep_for(std::chrono::milliseconds(20)); };
          rest();
          at::Tensor output = (input.defined() ? input : leaf) * 2;
          output.register_hook([rest](const at::Tensor&) { rest(); });
          return state.rank() + 1 == options.pipeline ? output.sum() : output;
        }});
      },
      threads);
  return trace;
}

bool overlap(const TraceEvent& a, const TraceEvent& b) {
  return a.begin < b.end && b.begin < a.end;
}

bool beside_a_task(const TraceEvent& transfer, int64_t rank,
                   const std::vector<TraceEvent>& events) {
  return std::any_of(events.begin(), events.end(), [&](const TraceEvent& event) {
    return event.kind == Kind::task && event.rank == rank && overlap(event, transfer);
  });
}

TEST(PipelineTraceTest, TransfersTakePlaceBesideTasksOfTheSameRank) {
  const auto events = traced_run({.pipeline = 2, .microbatches = 3})->events();
  const auto sent_beside_a_task = [&](const std::string& name, int64_t sender, int64_t rank) {
    const auto found = std::find_if(events.begin(), events.end(), [&](const TraceEvent& event) {
      return event.kind == Kind::send && event.rank == sender && event.name == name;
    });
    return found != events.end() && beside_a_task(*found, rank, events);
  };
  EXPECT_TRUE(sent_beside_a_task("F0.0", 0, 0));  // while its sender is in F1.0
  EXPECT_TRUE(sent_beside_a_task("B0.0", 1, 1));  // likewise
  EXPECT_TRUE(sent_beside_a_task("F1.0", 0, 1));  // while its receiver is in F0.0 or B0.0
}

TEST(PipelineTraceTest, HoldsEveryTaskAndTransferOnce) {
  const auto trace = traced_run({.pipeline = 2, .microbatches = 2});
  std::map<std::string, int> found;
  for (const TraceEvent& event : trace->events()) {
    EXPECT_LE(event.begin, event.end);
    ++found[std::to_string(event.rank) + " " + to_string(event.kind) + " " + event.name];
  }
  std::map<std::string, int> expected;
  for (const char* line :
       {"0 task F0.0", "0 task F1.0", "0 task B0.0", "0 task B1.0",    "0 send F0.0",
        "0 send F1.0", "0 wait B0.0", "0 wait B1.0", "0 receive B0.0", "0 receive B1.0",
        "1 task F0.0", "1 task F1.0", "1 task B0.0", "1 task B1.0",    "1 send B0.0",
        "1 send B1.0", "1 wait F0.0", "1 wait F1.0", "1 receive F0.0", "1 receive F1.0"})
    expected[line] = 1;
  EXPECT_EQ(found, expected);
}

TEST(PipelineTraceTest, ChromesFormat) {
  PipelineTrace trace;
  trace.add({Kind::send, 1, "F0.0", 7000, 9500});
  trace.add({Kind::task, 0, "F0.0", 5000, 6000});
  trace.add({Kind::task, 0, "a \"name\"\\\n", 9500, 9500});
  std::ostringstream out;
  trace.write_chrome_trace(out);
  const auto events = nlohmann::json::parse(out.str()).at("traceEvents");
  ASSERT_EQ(events.size(), 2u * 4 + 3);
  EXPECT_EQ(events[10].at("name"), "a \"name\"\\\n");
  EXPECT_EQ(events[0], nlohmann::json::parse(R"({"ph": "M", "pid": 0, "name": "process_name",
                                                 "args": {"name": "stage 0"}})"));
  EXPECT_EQ(events[8], nlohmann::json::parse(R"({"ph": "X", "pid": 0, "tid": 0, "name": "F0.0",
                                                 "cat": "task", "ts": 0, "dur": 1})"));
  EXPECT_EQ(events[9], nlohmann::json::parse(R"({"ph": "X", "pid": 1, "tid": 1, "name": "F0.0",
                                                 "cat": "send", "ts": 2, "dur": 2.5})"));
}

}  // namespace
}  // namespace lockstep
