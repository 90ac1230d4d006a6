#pragma once

// Internal: what a ProcessGroup handle refers to.

#include "lockstep/core/step_clock.h"
#include "lockstep/parallel_state/collective_record.h"
#include "lockstep/parallel_state/communicator.h"
#include "lockstep/parallel_state/device_watch.h"
#include "lockstep/parallel_state/process_group.h"
#include "lockstep/parallel_state/program_recorder.h"

namespace lockstep {

struct ProcessGroup::State {
  std::string name;
  std::vector<int64_t> ranks;
  int64_t rank = 0;         ///< position in `ranks`
  int64_t global_rank = 0;  ///< rank in the world, for messages
  std::chrono::milliseconds timeout{};
  c10::Device device = c10::kCPU;  ///< of the job
  std::shared_ptr<FailureBoard> failures;
  std::shared_ptr<DesyncGuard> guard;
  std::shared_ptr<Communicator> communicator;      ///< null for a group of one rank
  std::shared_ptr<DeviceWatch> watch;              ///< null where tensors live on the CPU
  std::shared_ptr<StepClock> clock;                ///< of the rank
  CollectiveObserver observer = {};                ///< may be empty
  std::shared_ptr<ProgramRecorder> recorder = {};  ///< of a planning rank; may be null
};

}  // namespace lockstep
