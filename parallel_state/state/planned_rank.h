#pragma once

// Internal.

#include <memory>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/program_recorder.h"

namespace lockstep {

/// An observer of ParallelState::planning_rank() that sees more than calls: that rank is created
/// with `options`, except for its sizes, and `recorder` sees everything that it does. On the meta
/// device tensors have no data: operations give no result, and none is complete before it is waited
/// for. Operations on CPU tensors give the same results as for any planning rank.
struct PlannedRank {
  std::shared_ptr<ProgramRecorder> recorder;
  ParallelStateOptions options = {};
  void operator()(const CollectiveRecord& /*record*/) const {}
};

}  // namespace lockstep
