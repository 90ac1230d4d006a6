#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/parallel_state/launch_environment.h"

namespace lockstep {

/// Which job this process belongs to, and how often the launcher has restarted it.
struct JobStart {
  std::string job_id;    ///< the same after every restart, and unique to the job; empty: not known
  int64_t restarts = 0;  ///< all of them
  int64_t requeues = 0;  ///< those by Slurm, which starts the whole job again, torchrun included
};

/// The id is LOCKSTEP_JOB_ID, which `lockstep launch` sets, or torchrun's TORCHELASTIC_RUN_ID
/// (unless it is "none", torchrun's default), or in a Slurm step that of SLURM_JOB_ID and
/// SLURM_STEP_ID. With an id, the restarts are TORCHELASTIC_RESTART_COUNT plus SLURM_RESTART_COUNT,
/// as far as these are set. ConfigError names a count that is not a number.
JobStart read_job_start(const EnvironmentReader& read);

/// The same, from the environment of this process.
JobStart read_job_start();

/// The start of ranks that have met, with their ParallelState::earlier_rounds(). In a store of
/// torchrun's agent that number is the same on all ranks. It replaces torchrun's count, in which
/// several hosts may differ, but not Slurm's: a requeued job has a new store.
JobStart with_earlier_rounds(JobStart start, std::optional<int64_t> rounds);

}  // namespace lockstep
