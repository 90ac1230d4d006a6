#pragma once

#include <cstdint>
#include <string>

#include "lockstep/parallel_state/launch_environment.h"

namespace lockstep {

/// Which job this process belongs to, and how often the launcher has started it again.
struct JobStart {
  std::string job_id;  ///< the same after every restart, of no other job; empty: nothing tells
  int64_t restarts = 0;
};

/// From LOCKSTEP_JOB_ID, which `lockstep launch` sets, or torchrun's TORCHELASTIC_RUN_ID (not where
/// that is "none", torchrun's default), with TORCHELASTIC_RESTART_COUNT; in a step of Slurm from
/// SLURM_JOB_ID and SLURM_STEP_ID with SLURM_RESTART_COUNT. ConfigError names a count that is no
/// number.
JobStart read_job_start(const EnvironmentReader& read);

/// The same, from the environment of this process.
JobStart read_job_start();

}  // namespace lockstep
