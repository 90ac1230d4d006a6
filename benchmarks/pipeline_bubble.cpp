// The idle time of pipeline schedules as the executor runs them, compared with the plan's. Stages
// sleep, so that ranks as threads do not contend for cores. A forward of all layers of a rank takes
// one unit, the backward two; transfers are real. The measured bubble is 1 - (time in tasks) /
// (ranks * time of the step), the median over the rounds.
//
//     pipeline_bubble [--trace FILE]    writes the last 1F1B step for chrome://tracing

#include <atomic>
#include <barrier>
#include <cstdio>
#include <fstream>
#include <string_view>
#include <thread>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "lockstep/benchmarks/interleaved.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/pipeline/simulation.h"

namespace lockstep::benchmarks {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

constexpr int64_t kWidth = 1024;
constexpr double kUnit = 0.1;  // seconds
constexpr size_t kRounds = 3;

std::atomic<int64_t> busy_nanoseconds = 0;

void sleep_for(double seconds) {
  const double slept =
      seconds_of([&] { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); });
  busy_nanoseconds += static_cast<int64_t>(slept * 1e9);
}

/// Passes its input on, slowly. So does its backward, both parts of which take equally long.
struct Sleep : torch::autograd::Function<Sleep> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input, const at::Tensor&,
                            double seconds) {
    context->saved_data["seconds"] = seconds;
    sleep_for(seconds);
    return input.clone();
  }
  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const double seconds = context->saved_data["seconds"].toDouble();
    variable_list result(3);
    for (const size_t part : {0, 1})
      if (context->needs_input_grad(part)) {
        sleep_for(seconds);
        result[part] = grads[0];
      }
    return result;
  }
};

void run_rank(const ScheduleOptions& options, const c10::intrusive_ptr<c10d::Store>& store,
              std::barrier<>& meet, int64_t rank, std::shared_ptr<PipelineTrace> trace,
              Samples& bubbles) {
  at::set_num_threads(1);
  ParallelStateOptions state_options;
  state_options.sizes.world_size = options.pipeline;
  state_options.sizes.pipeline = options.pipeline;
  const ParallelState state(store, rank, state_options);
  PipelineExecutorOptions executor_options;
  executor_options.activation_shape = [](int64_t) { return TensorShape{{kWidth}, at::kFloat}; };
  const PipelineExecutor executor(state, make_schedule(options), executor_options);
  executor_options.trace = std::move(trace);
  const PipelineExecutor traced(state, make_schedule(options), executor_options);
  const at::Tensor table = at::ones({kWidth}).requires_grad_(true);
  const at::Tensor weight = at::ones({kWidth}).requires_grad_(true);
  const int64_t chunks = options.virtual_pipeline;
  std::vector<PipelineStage> stages;
  for (int64_t c = 0; c < chunks; ++c)
    stages.push_back([&, c](int64_t, const at::Tensor& input) {
      const at::Tensor output = Sleep::apply(input.defined() ? input : table * 2, weight,
                                             kUnit / static_cast<double>(chunks));
      return rank == options.pipeline - 1 && c == chunks - 1 ? output.sum() : output;
    });
  for (size_t round = 0; round <= kRounds; ++round) {
    meet.arrive_and_wait();
    busy_nanoseconds = 0;
    meet.arrive_and_wait();
    const double seconds = seconds_of([&] {
      (round == kRounds ? traced : executor).run(stages);
      meet.arrive_and_wait();
    });
    if (rank == 0 && round > 0)
      bubbles.push_back(1 - static_cast<double>(busy_nanoseconds) * 1e-9 /
                                (static_cast<double>(options.pipeline) * seconds));
  }
}

void report(const ScheduleOptions& options, const std::shared_ptr<PipelineTrace>& trace = {}) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::barrier<> meet(options.pipeline);
  Samples bubbles;
  std::vector<std::thread> ranks;
  for (int64_t rank = 0; rank < options.pipeline; ++rank)
    ranks.emplace_back([&, rank] { run_rank(options, store, meet, rank, trace, bubbles); });
  for (std::thread& rank : ranks) rank.join();
  const PipelineSchedule schedule = make_schedule(options);
  const double plan = simulate(schedule, reference_cost(schedule)).bubble_fraction();
  const double measured = median(bubbles);
  std::printf("%-7s %6lld %7lld %14lld   %8.4f %9.4f   %6.3f\n", to_string(options.family),
              static_cast<long long>(options.pipeline),
              static_cast<long long>(options.virtual_pipeline),
              static_cast<long long>(options.microbatches), plan, measured, measured / plan);
}

}  // namespace
}  // namespace lockstep::benchmarks

int main(int argc, char** argv) {
  using lockstep::ScheduleFamily;
  using lockstep::benchmarks::report;
  lockstep::prepare_rank_threads();
  std::printf("%-7s %6s %7s %14s   %8s %9s   %6s\n", "", "ranks", "chunks", "micro-batches",
              "planned", "measured", "ratio");
  const auto trace = std::make_shared<lockstep::PipelineTrace>();
  report({.pipeline = 4, .microbatches = 8}, trace);
  report({.pipeline = 4, .virtual_pipeline = 2, .microbatches = 8});
  report({.pipeline = 4, .microbatches = 8, .family = ScheduleFamily::zb_h1});
  report({.pipeline = 4, .microbatches = 8, .family = ScheduleFamily::gpipe});
  if (argc == 3 && std::string_view(argv[1]) == "--trace") {
    std::ofstream out(argv[2]);
    trace->write_chrome_trace(out);
  }
}
