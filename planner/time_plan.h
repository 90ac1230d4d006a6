#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/time_simulation.h"

/// How long a step takes on a machine, and how much of the machine it uses. Needs no libtorch.
namespace lockstep {

struct TimePlan {
  std::string machine;           ///< its name
  StepTime step;                 ///< of simulate_step()
  double tflops_per_device = 0;  ///< of the model, see model_flops_per_token()
  /// Of the peak for matrix products in train.precision, or with train.fp8 in FP8.
  double utilisation = 0;
  std::vector<int64_t> peak_bytes = {};  ///< recorded_peaks() of each stage
};

/// The plan for `config`, which is resolved; `job` is record_job() of it, with kernels. Errors as
/// for simulate_step().
TimePlan plan_time(const Config& config, const JobProgram& job, const Machine& machine);

/// One JSON document, with a newline: step_ms, tflops_per_device, utilisation, compute_ms,
/// optimizer_ms, bubble_ms, exposed_communication_ms (averages of all ranks), peak_bytes, classes
/// (rank, ranks, compute_ms, optimizer_ms, exposed_communication_ms by group, bubble_ms).
void write_json(std::ostream& out, const TimePlan& plan);

/// The same for people.
void write_text(std::ostream& out, const TimePlan& plan);

}  // namespace lockstep
