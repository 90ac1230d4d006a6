#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/planner/machine.h"

namespace lockstep {

struct CalibrationOptions {
  /// Ranks of this host, which share its usable cores: each has (cores / ranks) threads.
  int64_t ranks = 2;
  /// Duration of each measurement, in two parts; there are about a hundred.
  double seconds_each = 0.15;
  /// Called with what is measured next.
  std::function<void(const std::string&)> progress = {};
};

/// Measures this host, as seen by `ranks` ranks on its CPU, for simulate_step(): operators on all
/// ranks at once, with operands that together do not fit the caches; the time the host needs to
/// start a kernel; collectives and messages of two ranks over the transport of CPU tensors; and
/// what such a collective takes from kernels that run at the same time. Results are the lower of
/// two medians for operators and the median of three for links, measured some seconds apart. Links
/// between hosts are not measured and are left out. Takes about 50 seconds and 1 GB.
///
/// ConfigError: fewer than one rank, or more ranks than cores. CommunicationError if the ranks
/// cannot reach each other. The PlannedDevice must not be in use.
Machine calibrate(const CalibrationOptions& options);

}  // namespace lockstep
