// Measurements of a host: the operators that programs have, with work as programs count it.

#include "lockstep/training/calibration.h"

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <map>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/tests/training/planned_layouts.h"
#include "lockstep/training/operator_trials.h"
#include "lockstep/training/planned_job.h"
#include "lockstep/training/step_trials.h"

namespace lockstep {
namespace {

using namespace testing;

const OperatorTrial& trial_of(const std::vector<OperatorTrial>& trials, const std::string& name,
                              double work) {
  for (const OperatorTrial& trial : trials)
    if (trial.name == name && trial.work == work) return trial;
  std::vector<double> found;
  for (const OperatorTrial& trial : trials)
    if (trial.name == name) found.push_back(trial.work);
  throw std::runtime_error(fmt::format("{} of {}: found {}", name, work, fmt::join(found, " ")));
}

TEST(OperatorTrials, WorkIsWhatProgramsCount) {
  const std::vector<OperatorTrial> trials = operator_trials();
  // Forward and both gradients of a layer: 2 * 128 * 64 * 192 each.
  EXPECT_EQ(trial_of(trials, "aten::mm", 3145728).num_calls, 2);
  EXPECT_EQ(trial_of(trials, "aten::addmm_", 3145728).num_calls, 1);
  EXPECT_EQ(trial_of(trials, "aten::addmm", 3145728).num_calls, 1);
  EXPECT_EQ(trial_of(trials, "aten::bmm", 2.0 * 8 * 64 * 64 * 32).num_calls, 1);
  // 4 sequences of 64 tokens, 4 heads of 16 channels, half of the pairs.
  const double pairs = 4.0 * 4 * 64 * 64 * 16 / 2;
  trial_of(trials, "aten::_scaled_dot_product_flash_attention", 4 * pairs);
  trial_of(trials, "aten::_scaled_dot_product_flash_attention_backward", 10 * pairs);
  // 64 x 64 elements of 4 bytes: two read and one written.
  for (const char* name : {"aten::add", "aten::add_", "aten::mul", "swiglu"})
    trial_of(trials, name, 3 * 64 * 64 * 4);
  trial_of(trials, "swiglu_gradient", 5 * 64 * 64 * 4);
  trial_of(trials, "aten::copy_", 2 * 64 * 64 * 4);
  trial_of(trials, "aten::zero_", 64 * 64 * 4);
  // Weights and both moments are read and written, the gradient is read.
  trial_of(trials, "adamw", 7 * 4096 * 4);
  EXPECT_EQ(trial_of(trials, "sum_of_squares", 4096 * 4 + 8).num_calls, 1);
}

/// Operators whose kernels make up more than `share` of all bytes of programs, or of all products.
std::set<std::string> used_operators(const Config& config, double share) {
  std::map<std::string, double> bytes, flops;
  double all_bytes = 0, all_flops = 0;
  const JobProgram job = record_job(config, 1, /*kernels=*/true);
  const RankProgram& program = job.programs.at(0);
  for (const ProgramEvent& event : program.events) {
    if (event.kind != ProgramEvent::Kind::kernel) continue;
    const ProgramKernel& kernel = program.kernels[event.value];
    (kernel.flops > 0 ? flops[kernel.name] : bytes[kernel.name]) +=
        kernel.flops > 0 ? kernel.flops : static_cast<double>(kernel.bytes);
    all_bytes += kernel.flops > 0 ? 0 : static_cast<double>(kernel.bytes);
    all_flops += kernel.flops;
  }
  std::set<std::string> used;
  for (const auto& [name, part] : bytes)
    if (part > share * all_bytes) used.insert(name);
  for (const auto& [name, part] : flops)
    if (part > share * all_flops) used.insert(name);
  return used;
}

TEST(OperatorTrials, TheOperatorsOfStepsAreListed) {
  std::set<std::string> listed;
  for (const OperatorTrial& trial : operator_trials()) listed.insert(trial.name);
  for (const Overrides& overrides :
       {Overrides{}, Overrides{"model.activation=gelu", "model.normalization=LayerNorm",
                               "model.add_bias_linear=true"}})
    for (const std::string& name : used_operators(config_of(overrides), 0.05))
      EXPECT_TRUE(listed.contains(name)) << name << " with " << fmt::format("{}", overrides);
}

TEST(StepTrials, TheHostTakesWhatKernelsLeaveOfTheStep) {
  Machine machine = parse_machine(
      "ranks_per_host: 1 half_tflops: 1 wide_tflops: 1 matrix_efficiency { from: 0 share: 1 } "
      "memory_gb_per_s: 10 memory_efficiency { from: 0 share: 1 } inside_host { gb_per_s: 1 "
      "efficiency: 1 latency_us: 1 } synchronous: true",
      "test");
  // What steps would take if the host needed 7 us for each kernel and collective of the programs.
  std::vector<double> measured;
  for (const Config& config : step_trials()) {
    const RankProgram program = record_rank(config, 1, 0, /*kernels=*/true);
    const size_t steps = program.step_ends.size();
    double seconds = 0;
    for (size_t i = program.step_ends[steps - 2]; i < program.step_ends[steps - 1]; ++i) {
      const ProgramEvent& event = program.events[i];
      if (event.kind == ProgramEvent::Kind::kernel)
        seconds += 7e-6 + machine.seconds(program.kernels[event.value]);
    }
    measured.push_back(seconds);
  }
  EXPECT_NEAR(launch_seconds_of(measured, machine, 1e-6), 7e-6, 1e-12);
  EXPECT_DOUBLE_EQ(launch_seconds_of({1e-9, 1e-9}, machine, 2e-6), 2e-6);
}

TEST(Calibration, MeasuresWhatAMachineFileHas) {
  std::set<std::string> told;
  CalibrationOptions options;
  options.ranks = 1;
  options.seconds_each = 1e-4;
  options.progress = [&](const std::string& part) { told.insert(part); };
  const Machine machine = parse_machine(machine_text(calibrate(options)), "text");
  EXPECT_EQ(machine.ranks_per_host, 1);
  EXPECT_TRUE(machine.synchronous);
  EXPECT_GT(machine.launch_s, 0);
  EXPECT_EQ(machine.between_hosts.bytes_per_s, 0);
  std::set<std::string> measured;
  for (const Machine::Times& times : machine.operators) {
    measured.insert(times.name);
    EXPECT_EQ(times.dtype, "Float") << times.name;
    EXPECT_GE(times.points.size(), 2u) << times.name;
  }
  for (const OperatorTrial& trial : operator_trials()) {
    EXPECT_TRUE(measured.contains(trial.name)) << trial.name;
    EXPECT_TRUE(told.contains(trial.name)) << trial.name;
  }
  EXPECT_EQ(machine.inside_host.collectives.size(), 7u);
  for (const Machine::Times& times : machine.inside_host.collectives) {
    // An operation on 8 MiB takes longer than one on 256 bytes.
    EXPECT_GT(times.points.back().seconds, times.points.front().seconds) << times.name;
    EXPECT_EQ(times.points.size(), 7u) << times.name;
  }
}

TEST(Calibration, RanksThatTheHostDoesNotHaveAreRefused) {
  for (const int64_t ranks : {0, 1 << 20}) {
    CalibrationOptions options;
    options.ranks = ranks;
    EXPECT_THROW(calibrate(options), ConfigError) << ranks;
  }
}

TEST(Calibration, OtherThanTwoHostsAreRefused) {
  const ParallelState alone = ParallelState::single_process();
  CalibrationOptions options;
  options.ranks = 1;
  options.hosts = &alone;
  EXPECT_TRUE(throws_with<ConfigError>([&] { calibrate(options); },
                                       "hosts to calibrate: found 1, allowed: 2"));
}

}  // namespace
}  // namespace lockstep
