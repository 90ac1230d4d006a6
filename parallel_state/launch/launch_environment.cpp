#include "lockstep/parallel_state/launch_environment.h"

#include <charconv>
#include <cstdlib>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/job_start.h"

namespace lockstep {
namespace {

/// Reads variables and checks them; every message names the variable.
class Variables {
 public:
  explicit Variables(const EnvironmentReader& read) : read_(read) {}

  bool has(const char* name) const { return read_(name).has_value(); }

  std::string text(const char* name) const {
    const auto value = read_(name);
    require<ConfigError>(value && !value->empty(), "environment variable {}: not set", name);
    return *value;
  }

  int number(const char* name, int least, int most) const {
    const std::string value = text(name);
    int result = 0;
    const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), result);
    require<ConfigError>(error == std::errc() && end == value.data() + value.size() &&
                             result >= least && result <= most,
                         "environment variable {}: found '{}', allowed: {} to {}", name, value,
                         least, most);
    return result;
  }

  std::string text_or(const char* name, const std::string& otherwise) const {
    return has(name) ? text(name) : otherwise;
  }

  int number_or(const char* name, int least, int most, int otherwise) const {
    return has(name) ? number(name, least, most) : otherwise;
  }

 private:
  const EnvironmentReader& read_;
};

constexpr int kMaxRanks = 1 << 24;
constexpr int kMaxPort = 65535;
constexpr int kMaxRestarts = 1 << 30;
constexpr char kLoopback[] = "127.0.0.1";

bool is_loopback(const std::string& address) {
  return address == "localhost" || address == "::1" || address.starts_with("127.");
}

/// Reads rank, sizes and local ranks under the names of one launcher.
LaunchEnvironment read_ranks(const Variables& variables, Launcher launcher, const char* rank,
                             const char* world_size, const char* local_rank,
                             const char* local_world_size) {
  LaunchEnvironment env;
  env.launcher = launcher;
  env.world_size = variables.number(world_size, 1, kMaxRanks);
  env.rank = variables.number(rank, 0, env.world_size - 1);
  env.local_world_size = variables.number_or(local_world_size, 1, env.world_size, 1);
  const int local_ranks = variables.has(local_world_size) ? env.local_world_size : env.world_size;
  env.local_rank = variables.number_or(local_rank, 0, local_ranks - 1, 0);
  return env;
}

/// A port that all ranks of a run derive in the same way from its name. It is below 32768, where
/// Linux begins to take ports for connections.
int port_of_run(const std::string& run_id) {
  return 20000 + static_cast<int>(text_digest(run_id) % 12000);
}

void read_meeting_point(const Variables& variables, LaunchEnvironment& env,
                        const std::string& address) {
  const bool has_address = variables.has("MASTER_ADDR");
  require<ConfigError>(has_address || !address.empty(),
                       "environment variable MASTER_ADDR: not set, and {} does not say where rank "
                       "0 runs; set it to the address of rank 0's host",
                       to_string(env.launcher));
  env.master_address = has_address ? variables.text("MASTER_ADDR") : address;
  env.master_port = variables.number_or("MASTER_PORT", 1, kMaxPort, port_of_run(env.run_id));
}

LaunchEnvironment read_torchrun(const Variables& variables) {
  LaunchEnvironment env = read_ranks(variables, Launcher::torchrun, "RANK", "WORLD_SIZE",
                                     "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (env.world_size == 1 && !variables.has("MASTER_ADDR")) return env;
  env.master_address = variables.text("MASTER_ADDR");
  env.master_port = variables.number("MASTER_PORT", 1, kMaxPort);
  env.agent_serves_store = variables.text_or("TORCHELASTIC_USE_AGENT_STORE", "False") == "True";
  if (variables.has("TORCHELASTIC_RUN_ID")) env.run_id = variables.text("TORCHELASTIC_RUN_ID");
  if (!env.run_id.empty() && !env.agent_serves_store)
    env.run_id += "/" + variables.text_or("TORCHELASTIC_RESTART_COUNT", "0");
  return env;
}

LaunchEnvironment read_open_mpi(const Variables& variables) {
  LaunchEnvironment env =
      read_ranks(variables, Launcher::open_mpi, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE",
                 "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  env.run_id =
      variables.text_or("PMIX_NAMESPACE", variables.text_or("OMPI_MCA_ess_base_jobid", ""));
  const bool one_host = env.local_world_size == env.world_size;
  read_meeting_point(variables, env, one_host ? kLoopback : "");
  return env;
}

LaunchEnvironment read_slurm(const Variables& variables) {
  LaunchEnvironment env;
  env.launcher = Launcher::slurm;
  // An interactive step keeps the job's SLURM_NTASKS and has one task.
  const bool of_step = variables.has("SLURM_STEP_NUM_TASKS");
  env.world_size =
      variables.number(of_step ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS", 1, kMaxRanks);
  env.rank = variables.number("SLURM_PROCID", 0, env.world_size - 1);
  const bool one_node = variables.number_or("SLURM_STEP_NUM_NODES", 1, kMaxRanks, 1) == 1;
  env.local_world_size = one_node
                             ? env.world_size
                             : slurm_tasks_on_node(variables.text("SLURM_STEP_TASKS_PER_NODE"),
                                                   variables.number("SLURM_NODEID", 0, kMaxRanks));
  env.local_rank = variables.number("SLURM_LOCALID", 0, env.local_world_size - 1);
  const std::string host =
      one_node ? kLoopback : first_slurm_host(variables.text("SLURM_STEP_NODELIST"));
  env.run_id =
      fmt::format("{}.{}/{}", variables.text("SLURM_JOB_ID"), variables.text("SLURM_STEP_ID"),
                  variables.text_or("SLURM_RESTART_COUNT", "0"));
  read_meeting_point(variables, env, host);
  return env;
}

/// LOCKSTEP_RUN_ID and, if the launcher counts its restarts, their number.
std::string given_run_id(const Variables& variables, const LaunchEnvironment& env) {
  const std::string id = variables.text("LOCKSTEP_RUN_ID");
  const bool of_torchrun = env.launcher == Launcher::torchrun && !env.agent_serves_store;
  const char* const count = of_torchrun                       ? "TORCHELASTIC_RESTART_COUNT"
                            : env.launcher == Launcher::slurm ? "SLURM_RESTART_COUNT"
                                                              : nullptr;
  return count && variables.has(count) ? id + "/" + variables.text(count) : id;
}

}  // namespace

bool LaunchEnvironment::single_host() const {
  return local_world_size == world_size || is_loopback(master_address);
}

std::string LaunchEnvironment::store_address() const {
  const bool keep = agent_serves_store || !single_host() ||
                    (is_loopback(master_address) && master_address != "localhost");
  return keep ? master_address : kLoopback;
}

const char* to_string(Launcher launcher) {
  switch (launcher) {
    case Launcher::none:
      return "single process";
    case Launcher::torchrun:
      return "torchrun";
    case Launcher::slurm:
      return "Slurm";
    case Launcher::open_mpi:
      return "Open MPI";
  }
  return "";
}

LaunchEnvironment read_launch_environment(const EnvironmentReader& read) {
  const Variables variables(read);
  LaunchEnvironment env;
  if (variables.has("RANK") || variables.has("WORLD_SIZE")) {
    env = read_torchrun(variables);
  } else if (variables.has("OMPI_COMM_WORLD_RANK")) {
    env = read_open_mpi(variables);
  } else if (variables.has("SLURM_PROCID") && variables.has("SLURM_STEP_ID")) {
    env = read_slurm(variables);
  }
  if (variables.has("LOCKSTEP_RUN_ID")) env.run_id = given_run_id(variables, env);
  return env;
}

EnvironmentReader environment_of_process() {
  return [](const char* name) {
    const char* const value = std::getenv(name);
    return value ? std::optional<std::string>(value) : std::nullopt;
  };
}

LaunchEnvironment read_launch_environment() {
  return read_launch_environment(environment_of_process());
}

JobStart read_job_start(const EnvironmentReader& read) {
  const Variables variables(read);
  const auto count = [&](const char* name) {
    return int64_t{variables.number_or(name, 0, kMaxRestarts, 0)};
  };
  JobStart start;
  const std::string torchrun = variables.text_or("TORCHELASTIC_RUN_ID", "none");
  if (torchrun != "none" || variables.has("LOCKSTEP_JOB_ID"))
    start.job_id = variables.text_or("LOCKSTEP_JOB_ID", torchrun);
  else if (variables.has("SLURM_JOB_ID") && variables.has("SLURM_STEP_ID"))
    start.job_id =
        fmt::format("slurm {}.{}", variables.text("SLURM_JOB_ID"), variables.text("SLURM_STEP_ID"));
  else
    return start;
  start.requeues = count("SLURM_RESTART_COUNT");
  start.restarts = count("TORCHELASTIC_RESTART_COUNT") + start.requeues;
  return start;
}

JobStart read_job_start() { return read_job_start(environment_of_process()); }

JobStart with_earlier_rounds(JobStart start, std::optional<int64_t> rounds) {
  if (rounds) start.restarts = *rounds + start.requeues;
  return start;
}

int slurm_tasks_on_node(const std::string& tasks_per_node, int node) {
  const char* at = tasks_per_node.data();
  const char* const end = at + tasks_per_node.size();
  for (int64_t first = 0; at < end;) {  // repeats may add up to more than an int holds
    int tasks = 0, repeat = 1;
    auto parsed = std::from_chars(at, end, tasks);
    bool good = parsed.ec == std::errc() && tasks >= 1;
    if (good && end - parsed.ptr >= 2 && parsed.ptr[0] == '(' && parsed.ptr[1] == 'x') {
      parsed = std::from_chars(parsed.ptr + 2, end, repeat);
      good = parsed.ec == std::errc() && repeat >= 1 && parsed.ptr != end && *parsed.ptr++ == ')';
    }
    good = good && (parsed.ptr == end || *parsed.ptr++ == ',');
    if (!good) break;
    if (node < first + repeat) return tasks;
    first += repeat;
    at = parsed.ptr;
  }
  fail<ConfigError>(
      "environment variable SLURM_STEP_TASKS_PER_NODE: found '{}', allowed: a list "
      "as in 8(x2),4 that covers node {}",
      tasks_per_node, node);
}

std::string first_slurm_host(const std::string& node_list) {
  const size_t end = node_list.find_first_of("[,");
  std::string host = node_list.substr(0, end);
  if (end == std::string::npos || node_list[end] == ',') return host;
  const size_t number_end = node_list.find_first_of("-,]", end + 1);
  require<ConfigError>(number_end != std::string::npos,
                       "environment variable SLURM_STEP_NODELIST: found '{}', allowed: a list as "
                       "in node[03-05,9]",
                       node_list);
  host += node_list.substr(end + 1, number_end - end - 1);
  const size_t close = node_list.find(']', number_end);
  return close == std::string::npos ? host : host + first_slurm_host(node_list.substr(close + 1));
}

}  // namespace lockstep
