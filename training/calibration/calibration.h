#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/planner/machine.h"

namespace lockstep {

struct CalibrationOptions {
  /// Ranks of this host, among which its usable cores are divided: each has (cores / ranks)
  /// threads, but no more than libtorch has (OMP_NUM_THREADS). Up to 16 ranks for each of several
  /// cores share them, with one thread each: then as many ranks are measured as there are cores,
  /// and Machine::cores is set. With two hosts each rank needs a core.
  int64_t ranks = 2;
  /// Duration of each measurement, in two parts; there are about a hundred.
  double seconds_each = 0.15;
  /// The two ranks of a job on two hosts, which both call calibrate(), to measure the link between
  /// them, too. The hosts should be alike: the link's times have half of what the slower one takes
  /// longer to compute in between. Must outlive the call. Call prepare_rank_threads() before it is
  /// made.
  const ParallelState* hosts = nullptr;
  /// Called with what is measured next.
  std::function<void(const std::string&)> progress = {};
};

/// Measures this host, as seen by `ranks` ranks on its CPU, for simulate_step(): operators on all
/// ranks at once, with operands that together do not fit the caches; the time the host needs to
/// start a kernel; collectives and messages of two ranks over the transport of CPU tensors; and
/// what such a collective takes from kernels that run at the same time. Results are the lower of
/// two medians for operators and the median of three for links, measured some seconds apart. Takes
/// about a minute and 1 GB, with two hosts on a link of 1 Gbit/s two and a half.
///
/// With two hosts the link is measured between one rank of each, and each host measures its own
/// operators and ranks at the same time. Otherwise `between_hosts` is left out.
///
/// ConfigError: fewer than one rank or more than allowed, or `hosts` of another world size than
/// two. CommunicationError if the ranks cannot reach each other. The PlannedDevice must not be in
/// use.
Machine calibrate(const CalibrationOptions& options);

}  // namespace lockstep
