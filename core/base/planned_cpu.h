#pragma once

// Internal.

namespace lockstep {

/// Whether the meta device stands for the CPU of a job that is planned, rather than for a GPU:
/// where they take different operators, that of the CPU runs. False unless a PlansCpu lives.
bool plans_cpu();

/// One at a time in a process.
class PlansCpu {
 public:
  explicit PlansCpu(bool yes);
  ~PlansCpu();
  PlansCpu(const PlansCpu&) = delete;
  PlansCpu& operator=(const PlansCpu&) = delete;
};

}  // namespace lockstep
