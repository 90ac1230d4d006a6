#pragma once

// Internal.

#include "lockstep/planner/machine.h"

namespace lockstep {

/// What two ranks of this host measure, as threads of this process with `threads` threads each: all
/// collectives and messages of machine.proto at sizes up to 8 MiB, and the share of a processor
/// that an all-reduce takes from kernels. A time is what an operation adds to half a millisecond of
/// computing before it, the average of both ranks. The rate and the latency are those of the
/// largest and of the smallest all-reduce. CommunicationError as the collectives.
Machine::Link measure_link(int threads);

}  // namespace lockstep
