#pragma once

// Internal.

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/planner/machine.h"

namespace lockstep {

/// Both measure two ranks: all collectives and messages of machine.proto at sizes up to 8 MiB, and
/// the share of a processor that an all-reduce takes from kernels. A time is what an operation adds
/// to about half a millisecond of computation before it, averaged over both ranks. The rate is that
/// of the largest all-reduce, the latency that of the smallest. CommunicationError as for the
/// collectives.

/// Two threads of this process as ranks of this host, with `threads` threads each.
Machine::Link measure_inside_host(int threads);

/// The two ranks of `state`, which are on two hosts. Both call it, and get the same.
Machine::Link measure_between_hosts(const ParallelState& state);

}  // namespace lockstep
