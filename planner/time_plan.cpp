#include "lockstep/planner/time_plan.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <ostream>

#include "lockstep/core/check.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/model_flops.h"

namespace lockstep {
namespace {

nlohmann::ordered_json to_json(const RankTime& rank) {
  nlohmann::ordered_json exposed = nlohmann::ordered_json::object();
  for (const auto& [group, seconds] : rank.exposed_s) exposed[group] = 1e3 * seconds;
  return {{"rank", rank.rank},
          {"ranks", rank.num_ranks},
          {"compute_ms", 1e3 * rank.compute_s},
          {"optimizer_ms", 1e3 * rank.optimizer_s},
          {"exposed_communication_ms", std::move(exposed)},
          {"bubble_ms", 1e3 * rank.bubble_s}};
}

/// With train.fp8 other products still run in train.precision, whose peak may be the higher one.
double peak_of(const TrainConfig& train, const Machine& machine) {
  const bool half = train.precision == Precision::bf16 || train.precision == Precision::fp16;
  const double peak = half ? machine.half_flops_per_s : machine.wide_flops_per_s;
  return train.fp8 == Fp8Format::none ? peak : std::max(peak, machine.peak_of("Float8_e4m3fn"));
}

}  // namespace

TimePlan plan_time(const Config& config, const JobProgram& job, const Machine& machine) {
  TimePlan plan = {.machine = machine.name, .step = simulate_step(job, machine)};
  const int64_t world_size = job.world_size();
  const RankGrids grids = config_grids(config.parallel, world_size);
  const double tokens =
      static_cast<double>(batch_sizes(config.train, grids.data_parallel_size()).global) *
      static_cast<double>(config.model.seq_length);
  const double rate =
      tokens * model_flops_per_token(config) / plan.step.step_s / static_cast<double>(world_size);
  plan.tflops_per_device = rate / 1e12;
  plan.utilisation = rate / peak_of(config.train, machine);
  plan.peak_bytes = recorded_peaks(job);
  return plan;
}

void write_json(std::ostream& out, const TimePlan& plan) {
  nlohmann::ordered_json json = {{"step_ms", 1e3 * plan.step.step_s},
                                 {"tflops_per_device", plan.tflops_per_device},
                                 {"utilisation", plan.utilisation},
                                 {"compute_ms", 1e3 * plan.step.compute_s()},
                                 {"optimizer_ms", 1e3 * plan.step.optimizer_s()},
                                 {"bubble_ms", 1e3 * plan.step.bubble_s()},
                                 {"exposed_communication_ms", 1e3 * plan.step.exposed_s()}};
  json["peak_bytes"] = plan.peak_bytes;
  for (const RankTime& rank : plan.step.ranks) json["classes"].push_back(to_json(rank));
  out << json.dump() << "\n";
}

void write_text(std::ostream& out, const TimePlan& plan) {
  out << fmt::format(
      "on {}: {:.2f} ms a step, {:.1f} TFLOP/s of a device, {:.1f} % of the peak\n"
      "averages of all ranks, ms: compute {:.2f}, exposed communication {:.2f}, bubble {:.2f}, "
      "optimizer {:.2f}\n",
      plan.machine, 1e3 * plan.step.step_s, plan.tflops_per_device, 100 * plan.utilisation,
      1e3 * plan.step.compute_s(), 1e3 * plan.step.exposed_s(), 1e3 * plan.step.bubble_s(),
      1e3 * plan.step.optimizer_s());
  for (size_t stage = 0; stage < plan.peak_bytes.size(); ++stage)
    out << fmt::format("{}{:.2f}{}", stage == 0 ? "most memory of each stage, GiB: " : ", ",
                       static_cast<double>(plan.peak_bytes[stage]) / (1 << 30),
                       stage + 1 == plan.peak_bytes.size() ? "\n" : "");
  out << fmt::format("\n{:>8}  {:>8}  {:>10}  {:>10}  {:>10}  {:>10}  exposed by group\n", "rank",
                     "alike", "compute", "exposed", "bubble", "optimizer");
  for (const RankTime& rank : plan.step.ranks) {
    std::string groups;
    for (const auto& [group, seconds] : rank.exposed_s)
      groups += fmt::format("{}{} {:.2f}", groups.empty() ? "" : ", ", group, 1e3 * seconds);
    out << fmt::format("{:>8}  {:>8}  {:>10.2f}  {:>10.2f}  {:>10.2f}  {:>10.2f}  {}\n", rank.rank,
                       rank.num_ranks, 1e3 * rank.compute_s, 1e3 * rank.exposed_total_s(),
                       1e3 * rank.bubble_s, 1e3 * rank.optimizer_s, groups);
  }
}

}  // namespace lockstep
