#pragma once

// Internal.

#include <memory>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/program_recorder.h"

namespace lockstep {

/// An observer of ParallelState::planning_rank() that sees more than calls: that rank is made with
/// `options`, apart from its sizes, and `recorder` sees all that it does. On the meta device
/// tensors have no data: nothing is answered, and no operation is over before it is waited
/// for. Tensors on the CPU are answered as for any planning rank.
struct PlannedRank {
  std::shared_ptr<ProgramRecorder> recorder;
  ParallelStateOptions options = {};
  void operator()(const CollectiveRecord& /*record*/) const {}
};

}  // namespace lockstep
