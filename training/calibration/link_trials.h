#pragma once

// Internal.

#include "lockstep/planner/machine.h"

namespace lockstep {

/// Measurements of two ranks of this host, which are threads of this process with `threads` threads
/// each: all collectives and messages of machine.proto at sizes up to 8 MiB, and the share of a
/// processor that an all-reduce takes from kernels. A time is what an operation adds to half a
/// millisecond of computation before it, averaged over both ranks. The rate is that of the largest
/// all-reduce, the latency that of the smallest. CommunicationError as for the collectives.
Machine::Link measure_link(int threads);

}  // namespace lockstep
