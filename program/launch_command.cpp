#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <system_error>

#include "lockstep/core/check.h"
#include "lockstep/core/usable_cores.h"
#include "lockstep/parallel_state/job_secret.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/installation.h"
#include "lockstep/program/rank_processes.h"
#include "lockstep/program/torchrun.h"
#include "lockstep/program/train_arguments.h"

namespace lockstep {
namespace {

struct LaunchArguments {
  int64_t ranks = 0;
  int64_t nodes = 1;
  int64_t node_rank = -1;
  std::string rendezvous;
  std::string starter = "auto";
  int64_t max_restarts = 0;
  int64_t spares = 0;
  std::string program;
  std::vector<std::string> arguments;
};

struct Rendezvous {
  std::string host;
  int port = 0;
};

/// "node1:29500", "[::1]:29500"
Rendezvous parse_rendezvous(const std::string& text) {
  const size_t colon = text.rfind(':');
  std::string host = text.substr(0, colon);
  if (host.starts_with('[') && host.ends_with(']')) host = host.substr(1, host.size() - 2);
  const std::vector<int64_t> port = colon == std::string::npos
                                        ? std::vector<int64_t>{}
                                        : parse_integers(text.substr(colon + 1), '\0');
  require<ConfigError>(!host.empty() && port.size() == 1 && port[0] >= 1 && port[0] <= 65535,
                       "--rendezvous: found '{}', allowed: HOST:PORT with a port of 1 to 65535",
                       text);
  return {host, static_cast<int>(port[0])};
}

void check(const LaunchArguments& given) {
  require<ConfigError>(
      !given.arguments.empty() || !given.program.empty(),
      "launch: nothing to run, allowed: a command after --, as in `lockstep launch "
      "-n 2 -- train tiny`");
  if (given.nodes == 1) {
    require<ConfigError>(given.node_rank <= 0, "--node-rank: found {}, allowed with one node: 0",
                         given.node_rank);
    return;
  }
  require<ConfigError>(given.max_restarts == 0,
                       "--max-restarts: found {}, allowed with --nodes {}: 0; Slurm's --requeue "
                       "restarts jobs on several hosts",
                       given.max_restarts, given.nodes);
  require<ConfigError>(given.starter != "own",
                       "--starter own starts the ranks of one host; found --nodes {}", given.nodes);
  require<ConfigError>(given.node_rank >= 0 && given.node_rank < given.nodes,
                       "--node-rank: {}, allowed with --nodes {}: 0 to {}",
                       given.node_rank < 0 ? "not given" : fmt::format("found {}", given.node_rank),
                       given.nodes, given.nodes - 1);
  require<ConfigError>(!given.rendezvous.empty(),
                       "--rendezvous: not given, allowed with --nodes {}: HOST:PORT, the same on "
                       "all nodes, where HOST is the node with --node-rank 0",
                       given.nodes);
}

/// What `train` is to be started with; nullopt for another command, or if that cannot be read. The
/// ranks report it then, unless there are to be spares, which depend on it.
std::optional<TrainArguments> train_arguments(const LaunchArguments& given) {
  if (given.arguments.empty() || given.arguments.front() != "train") return std::nullopt;
  CLI::App train;
  TrainArguments arguments;
  add_train_options(train, arguments);
  train.allow_extras();
  try {
    train.parse(std::vector<std::string>(given.arguments.rbegin(), given.arguments.rend() - 1));
    return arguments;
  } catch (const CLI::Error&) {
  } catch (const Error&) {
    if (given.spares > 0) throw;
  }
  return std::nullopt;
}

void check_config_file(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  require<ConfigError>(!std::filesystem::is_fifo(status) && !std::filesystem::is_socket(status),
                       "CONFIG: '{}' can be read only once; allowed with launch: a file, which "
                       "every rank reads",
                       path);
}

/// Whether the ranks train with train.elastic = dp. The ranks report what cannot be read, as above.
bool trains_elastically(const LaunchArguments& given) {
  const auto arguments = train_arguments(given);
  if (!arguments) return false;
  try {
    return load_train_config(*arguments).train.elastic == Elastic::dp;
  } catch (const Error&) {
    if (given.spares > 0) throw;
  }
  return false;
}

void check_spares(const LaunchArguments& given, bool elastic) {
  require<ConfigError>(given.spares == 0 || (elastic && given.starter != "torchrun"),
                       "--spares: found {}, allowed: 0, unless `train` runs on one host with "
                       "train.elastic = dp and lockstep's own starter",
                       given.spares);
}

/// The torchrun to use; empty for Lockstep's own starter.
std::string chosen_torchrun(const LaunchArguments& given, bool elastic) {
  const bool needs_own = given.nodes == 1 && (given.max_restarts > 0 || elastic);
  if (given.starter == "own" || (given.starter == "auto" && needs_own)) return "";
  const std::string torchrun = find_torchrun();
  if (!torchrun.empty()) return torchrun;
  constexpr char kRemedy[] =
      "install it (pip install torch) or put its folder on PATH; Slurm and Open MPI need no "
      "launcher: they start `lockstep train` themselves";
  require<ConfigError>(given.nodes == 1,
                       "--nodes {} needs torchrun, but no working torchrun was found: "
                       "{}",
                       given.nodes, kRemedy);
  require<ConfigError>(given.starter != "torchrun",
                       "--starter torchrun: no working torchrun was found: {}", kRemedy);
  return "";
}

/// Sets an id that tells the ranks of this job apart from those of all others, after restarts too.
void name_job() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto started = std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  const std::string id = fmt::format("launch {}/{}/{}", host, ::getpid(), started);
  ::setenv("LOCKSTEP_JOB_ID", id.c_str(), /*overwrite=*/1);
}

/// Divides the usable cores among the ranks as threads, unless the user has set their number.
void share_out_cores(int64_t ranks) {
  const std::string threads = std::to_string(std::max<int64_t>(1, usable_cores() / ranks));
  ::setenv("OMP_NUM_THREADS", threads.c_str(), /*overwrite=*/0);
}

std::vector<std::string> torchrun_command(const std::string& torchrun, const LaunchArguments& given,
                                          const std::string& program) {
  std::vector<std::string> command = {torchrun};
  if (given.rendezvous.empty()) {
    command.push_back("--standalone");
  } else {
    const Rendezvous rendezvous = parse_rendezvous(given.rendezvous);
    const std::string node_rank = std::to_string(std::max<int64_t>(0, given.node_rank));
    command.insert(command.end(), {"--nnodes", std::to_string(given.nodes), "--node-rank",
                                   node_rank, "--master-addr", rendezvous.host, "--master-port",
                                   std::to_string(rendezvous.port)});
  }
  if (given.max_restarts > 0)
    command.insert(command.end(), {"--max-restarts", std::to_string(given.max_restarts)});
  command.insert(command.end(),
                 {"--no-python", "--nproc-per-node", std::to_string(given.ranks), program});
  command.insert(command.end(), given.arguments.begin(), given.arguments.end());
  return command;
}

constexpr char kRanksDoNotStay[] =
    "lockstep launch: with --starter torchrun a lost rank ends all ranks, even with train.elastic "
    "= dp; with --starter own the other ranks keep running\n";

void run(const LaunchArguments& given) {
  check(given);
  if (const auto arguments = train_arguments(given)) check_config_file(arguments->config_path);
  const std::string program = given.program.empty() ? program_file().string() : given.program;
  LaunchedProgram ranks = {.file = program,
                           .arguments = given.arguments,
                           .ranks = static_cast<int>(given.ranks),
                           .spares = static_cast<int>(given.spares),
                           .max_restarts = static_cast<int>(given.max_restarts),
                           .elastic = given.nodes == 1 && trains_elastically(given)};
  check_spares(given, ranks.elastic);
  check_program(ranks, static_cast<int>(std::max<int64_t>(0, given.node_rank) * given.ranks));
  if (!given.rendezvous.empty()) {
    const Rendezvous rendezvous = parse_rendezvous(given.rendezvous);
    ranks.master_address = rendezvous.host;
    ranks.master_port = rendezvous.port;
  }
  const std::string torchrun = chosen_torchrun(given, ranks.elastic);
  share_out_cores(given.ranks);
  if (given.nodes == 1) name_job();
  if (!torchrun.empty() && ranks.elastic) std::cerr << kRanksDoNotStay << std::flush;
  if (!torchrun.empty()) become(torchrun_command(torchrun, given, program));
  give_job_secret(/*keeps_file=*/ranks.elastic || ranks.max_restarts > 0);
  throw ExitStatus{run_rank_processes(ranks), ""};
}

constexpr char kExamples[] = R"(Examples:
  lockstep launch -n 8 -- train tiny --output runs/tiny
  lockstep launch -n 8 --max-restarts 3 -- train tiny --output runs/tiny
  lockstep launch -n 8 --nodes 4 --node-rank 0 --rendezvous node0:29500 -- train tiny
The last command runs on the first of four nodes; the others use --node-rank 1, 2 and 3.
lockstep's own starter exits with the status of the first rank that fails; torchrun exits with 1.
lockstep's own starter gives its ranks a random LOCKSTEP_SECRET, unless the environment sets
LOCKSTEP_SECRET or LOCKSTEP_SECRET_FILE.
OMP_NUM_THREADS is the number of usable cores divided by this host's ranks, unless you set it.)";

}  // namespace

void add_launch_command(CLI::App& program, const std::vector<std::string>& arguments) {
  auto given = std::make_shared<LaunchArguments>();
  given->arguments = arguments;
  CLI::App* const command = program.add_subcommand(
      "launch", "Run lockstep as several ranks; the command that they run comes after --");
  command->add_option("-n,--ranks", given->ranks, "Number of ranks on this host, at most 65536")
      ->required()
      ->check(check_at_least(1))
      ->check(check_between(1, 65536));
  command
      ->add_option("--nodes", given->nodes, "Number of hosts, each with the same number of ranks")
      ->capture_default_str()
      ->check(check_at_least(1));
  command->add_option("--node-rank", given->node_rank, "Index of this host: 0 to NODES - 1")
      ->check(check_at_least(0));
  command
      ->add_option("--rendezvous", given->rendezvous,
                   "Rendezvous address: the host with --node-rank 0 and a free port on that host. "
                   "With one host the default is this host and any free port")
      ->type_name("HOST:PORT");
  command
      ->add_option(
          "--starter", given->starter,
          "What starts the ranks. own: lockstep itself, for one host, without Python. torchrun: "
          "torchrun. auto: own with --max-restarts or train.elastic = dp; otherwise torchrun if a "
          "working one is found in lockstep's Python environment or on PATH; otherwise own")
      ->type_name("auto|torchrun|own")
      ->capture_default_str()
      ->check(check_one_of({"auto", "torchrun", "own"}));
  command
      ->add_option(
          "--max-restarts", given->max_restarts,
          "How many times to restart all ranks after one has failed. `train` then resumes from the "
          "newest checkpoint that this launch has saved. With train.elastic = dp only lost ranks "
          "are restarted; when no restarts are left, the other ranks continue without them. On one "
          "host only")
      ->capture_default_str()
      ->check(check_at_least(0))
      ->check(check_between(0, 1'000'000));
  command
      ->add_option(
          "--spares", given->spares,
          "Number of extra processes that wait, ready to train, and replace lost ranks at once. "
          "Needs train.elastic = dp. Each spare needs its own GPU; spares use the GPUs after those "
          "of the ranks")
      ->capture_default_str()
      ->check(check_at_least(0))
      ->check(check_between(0, 65536));
  command
      ->add_option("--program", given->program,
                   "Run this program instead of lockstep, such as your own training loop")
      ->type_name("FILE")
      ->check(check_path);
  command->footer(kExamples);
  command->callback([given] { run(*given); });
}

}  // namespace lockstep
