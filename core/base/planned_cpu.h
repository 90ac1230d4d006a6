#pragma once

// Internal.

namespace lockstep {

/// Whether the meta device represents the CPU of a job that is planned, rather than a GPU: where
/// the two use different operators, the CPU's runs. False unless a PlansCpu exists.
bool plans_cpu();

/// Whether it represents a GPU, which has a host with a memory of its own. False unless a PlansCpu
/// exists.
bool plans_gpu();

/// At most one at a time in a process.
class PlansCpu {
 public:
  explicit PlansCpu(bool yes);
  ~PlansCpu();
  PlansCpu(const PlansCpu&) = delete;
  PlansCpu& operator=(const PlansCpu&) = delete;
};

/// While it lives, tensors that this thread makes on the meta device represent memory of the host,
/// not of the planned GPU, and operators represent the host's work, or copies beside the GPU's.
/// Nothing counts such memory or work. May be nested.
class OnPlannedHost {
 public:
  /// `yes` = false: it changes nothing.
  explicit OnPlannedHost(bool yes = true);
  ~OnPlannedHost();
  OnPlannedHost(const OnPlannedHost&) = delete;
  OnPlannedHost& operator=(const OnPlannedHost&) = delete;

  /// Whether one lives on this thread.
  static bool is_active();

 private:
  bool before_;
};

}  // namespace lockstep
