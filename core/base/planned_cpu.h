#pragma once

// Internal.

namespace lockstep {

/// Whether the meta device represents the CPU of a job that is planned, rather than a GPU: where
/// the two use different operators, the CPU's runs. False unless a PlansCpu exists.
bool plans_cpu();

/// At most one at a time in a process.
class PlansCpu {
 public:
  explicit PlansCpu(bool yes);
  ~PlansCpu();
  PlansCpu(const PlansCpu&) = delete;
  PlansCpu& operator=(const PlansCpu&) = delete;
};

}  // namespace lockstep
