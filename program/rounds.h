#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/job_start.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The context of one round of a training.
struct Round {
  const Config& config;  ///< with the batch size of the run's first round
  const ParallelState& state;
  JobStart start;
  StateCopies& copies;  ///< of all rounds of this process
};

/// Trains as the rank that the launcher's environment describes: meets the other ranks and calls
/// `train`. An exception from this ends the program after the other ranks have learned of it:
/// ExitStatus with the rank's number in the message.
///
/// With train.elastic = dp, if `lockstep launch` has started this rank, a CommunicationError (a
/// rank is lost, or does not answer) does not end the program. The rank destroys whatever belongs
/// to the round, waits for its launcher's order and begins the next round, with the same device and
/// in the same process. A spare (LaunchChannel::spare_of()) waits for that order before its first
/// round. A rank that waits ignores SIGTERM. If an error of the rank's own device was the cause,
/// the rank ends instead: its process can use the device no more.
/// `folder` is where the run saves, and from where it resumes; empty: nowhere. ConfigError:
/// checkpoint.in_memory_replicas for ranks that do not stay, or that are too few.
void run_rounds(Config config, const std::string& folder,
                const std::function<void(const Round&)>& train);

}  // namespace lockstep
