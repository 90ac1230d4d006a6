#pragma once

// Internal: what stands behind a ProcessGroup handle.

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

struct ProcessGroup::State {
  std::string name;
  std::vector<int64_t> ranks;
  int64_t rank = 0;         ///< position in `ranks`
  int64_t global_rank = 0;  ///< rank in the world, for messages
  std::chrono::milliseconds timeout{};
  std::shared_ptr<const FailureBoard> failures;
  c10::intrusive_ptr<c10d::ProcessGroup> c10d;  ///< null for a group of one rank
};

}  // namespace lockstep
