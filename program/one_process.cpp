#include "lockstep/program/one_process.h"

#include <cstdlib>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/launch_environment.h"

namespace lockstep {
namespace {

/// The variable that says how many processes the launcher started.
const char* variable_of(Launcher launcher) {
  if (launcher == Launcher::open_mpi) return "OMPI_COMM_WORLD_SIZE";
  if (launcher != Launcher::slurm) return "WORLD_SIZE";
  return std::getenv("SLURM_STEP_NUM_TASKS") ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
}

}  // namespace

void require_one_process(const char* command) {
  const LaunchEnvironment environment = read_launch_environment();
  require<ConfigError>(environment.world_size == 1,
                       "environment variable {}: found {}, allowed: 1, because {} runs in one "
                       "process",
                       variable_of(environment.launcher), environment.world_size, command);
}

}  // namespace lockstep
