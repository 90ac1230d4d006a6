#pragma once

#include <functional>
#include <string>

#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/job_start.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// What a round of a training has.
struct Round {
  const Config& config;  ///< with the batch size of the run's first round
  const ParallelState& state;
  JobStart start;
  StateCopies& copies;  ///< of all rounds of this process
};

/// Trains as the rank that the launcher's environment describes: meets the other ranks and calls
/// `train`. What it throws ends the program, after the other ranks have learned of it: ExitStatus
/// with the rank's number in the message.
///
/// With train.elastic = dp, where `lockstep launch` has started this rank, a CommunicationError (a
/// rank is lost, or nobody answers) does not end it. Whatever belongs to the round goes, the rank
/// waits for its launcher's word and begins the next one, with its device and in its process. A
/// spare (LaunchChannel::spare_of()) waits for that word before its first round.
/// `folder` is where the run saves, and from where it resumes; empty: nowhere. ConfigError:
/// checkpoint.in_memory_replicas of ranks that do not stay, or are too few.
void run_rounds(Config config, const std::string& folder,
                const std::function<void(const Round&)>& train);

}  // namespace lockstep
