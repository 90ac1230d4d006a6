#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/planner/machine.h"

namespace lockstep {

struct CalibrationOptions {
  /// Of this host, which share its cores: each has (cores / ranks) threads.
  int64_t ranks = 2;
  /// Of each measurement, of which there are about a hundred.
  double seconds_each = 0.15;
  /// Is told what is measured next.
  std::function<void(const std::string&)> progress = {};
};

/// Measures this host as `ranks` ranks on its CPU find it, for simulate_step(): operators on all
/// ranks at once, with operands that do not fit the caches together; what the host needs to start a
/// kernel; collectives and messages of two ranks over the transport of CPU tensors; and what such a
/// collective takes from kernels that run meanwhile. Medians. Links between hosts are not measured,
/// and left out. Takes about half a minute and 1 GB.
///
/// ConfigError: fewer than one rank, or more than there are cores. CommunicationError where ranks
/// cannot talk to each other. The PlannedDevice must not be in use.
Machine calibrate(const CalibrationOptions& options);

}  // namespace lockstep
