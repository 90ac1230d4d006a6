#pragma once

#include <functional>
#include <optional>
#include <string>

namespace lockstep {

/// The program that started this process.
enum class Launcher { none, torchrun, slurm, open_mpi };

/// "single process", "torchrun", "Slurm", "Open MPI"
const char* to_string(Launcher launcher);

/// What the launcher says about this process and the others.
struct LaunchEnvironment {
  Launcher launcher = Launcher::none;
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;        ///< position among the ranks of this host; picks the device
  int local_world_size = 1;  ///< ranks of this host
  std::string master_address = "127.0.0.1";  ///< where the store is
  int master_port = 29500;
  /// torchrun's agent serves the store itself, and every rank, including rank 0, is a client.
  /// Otherwise rank 0 serves the store.
  bool agent_serves_store = false;

  /// Distinguishes this run from others that use the same store, and from its own restarts (in the
  /// store of torchrun's agent, the ranks do that when they meet).
  std::string run_id;

  /// Whether all ranks run on this host, so that they meet on the loopback interface: according to
  /// the launcher's counts, or because master_address is a loopback address.
  bool single_host() const;
  /// Where the store is: a loopback address on a single host, unless torchrun's agent serves it.
  std::string store_address() const;
};

/// Reads one environment variable; empty optional if it is not set.
using EnvironmentReader = std::function<std::optional<std::string>(const char* name)>;

/// Determines the environment from, in this order: torchrun's variables (RANK, WORLD_SIZE,
/// LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_USE_AGENT_STORE), Open
/// MPI's (OMPI_COMM_WORLD_*), Slurm's step variables (SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID,
/// SLURM_STEP_NODELIST, SLURM_STEP_TASKS_PER_NODE); if none is set, a single process. Open MPI and
/// Slurm do not say where to meet: MASTER_ADDR and MASTER_PORT are used if they are set; otherwise
/// the first host of the step (Slurm) or, on one host, loopback, and a port from 20000 to 31999
/// derived from the job's id.
///
/// run_id is torchrun's TORCHELASTIC_RUN_ID and TORCHELASTIC_RESTART_COUNT ("ID/0"), Slurm's job,
/// step and SLURM_RESTART_COUNT ("77.0/0"), Open MPI's PMIX_NAMESPACE; otherwise empty. If
/// LOCKSTEP_RUN_ID is set, it replaces all of that but the count of restarts. With a store of
/// torchrun's agent there is no count ("ID"): the agents of several hosts count differently.
///
/// ConfigError names the variable that is missing, not a number, or out of range.
LaunchEnvironment read_launch_environment(const EnvironmentReader& read);

/// Reads the environment of this process.
EnvironmentReader environment_of_process();

/// The same, from the environment of this process.
LaunchEnvironment read_launch_environment();

/// Tasks on node `node` (from 0) of Slurm's list of tasks per node: "8(x2),4" has 8, 8 and 4.
int slurm_tasks_on_node(const std::string& tasks_per_node, int node);

/// The first host of a Slurm node list: "node[03-05,9],login1" -> "node03".
std::string first_slurm_host(const std::string& node_list);

}  // namespace lockstep
