#include "lockstep/program/rank_process.h"

#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/check.h"
#include "lockstep/parallel_state/launch_channel.h"
#include "lockstep/parallel_state/network.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

constexpr int kCannotRun = 1;

void report_exec_failure(int rank, const std::string& file, int error) {
  std::fprintf(stderr, "lockstep launch: rank %d cannot run %s: %s\n", rank, file.c_str(),
               std::strerror(error));
}

/// Runs in the new process.
[[noreturn]] void become_rank(const LaunchedProgram& program, const RankRound& round, int rank) {
  for (const auto& [name, value] : variables_of_rank(program, round, rank))
    ::setenv(name.c_str(), value.c_str(), /*overwrite=*/1);
  std::vector<char*> arguments = {const_cast<char*>(program.file.c_str())};
  for (const std::string& argument : program.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(program.file.c_str(), arguments.data());
  report_exec_failure(rank, program.file, errno);
  std::_Exit(kCannotRun);
}

/// The errno of executing the file; 0 if it can be executed.
int error_of_file(const std::string& path) {
  struct stat status = {};
  if (::stat(path.c_str(), &status) != 0) return errno;
  if (!S_ISREG(status.st_mode)) return EACCES;
  return ::access(path.c_str(), X_OK) == 0 ? 0 : errno;
}

/// The same for a program that execvp() looks for.
int error_of_program(const std::string& name) {
  if (name.find('/') != std::string::npos) return error_of_file(name);
  const char* const path = std::getenv("PATH");
  const std::string folders = path ? path : "/bin:/usr/bin";
  int error = ENOENT;
  for (size_t begin = 0; begin <= folders.size();) {
    const size_t end = std::min(folders.find(':', begin), folders.size());
    const std::string folder = folders.substr(begin, end - begin);
    const int found = error_of_file(folder.empty() ? name : folder + "/" + name);
    if (found == 0) return 0;
    if (found == EACCES) error = found;
    begin = end + 1;
  }
  return error;
}

}  // namespace

void check_program(const LaunchedProgram& program, int first_rank) {
  const int error = error_of_program(program.file);
  if (error == 0) return;
  report_exec_failure(first_rank, program.file, error);
  throw ExitStatus{kCannotRun, ""};
}

ReservedPort::ReservedPort(const std::string& address)
    : socket_(bound_socket(address, 0, /*for_other_hosts=*/false)) {}

ReservedPort::~ReservedPort() { ::close(socket_); }

int ReservedPort::number() const {
  sockaddr_storage address = {};
  socklen_t size = sizeof address;
  ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
  const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&address);
  const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&address);
  return ntohs(address.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
}

VariableList variables_of_rank(const LaunchedProgram& program, const RankRound& round, int rank) {
  const std::string position = std::to_string(rank), ranks = std::to_string(round.ranks);
  VariableList variables = {{"RANK", position},
                            {"LOCAL_RANK", position},
                            {"WORLD_SIZE", ranks},
                            {"LOCAL_WORLD_SIZE", ranks},
                            {"MASTER_ADDR", program.master_address},
                            {"MASTER_PORT", std::to_string(round.master_port)},
                            {"TORCHELASTIC_RESTART_COUNT", std::to_string(round.number)}};
  if (round.spare_of) variables.emplace_back(kSpareVariable, std::to_string(round.spare_of));
  return variables;
}

pid_t start_rank(const LaunchedProgram& program, const RankRound& round, int rank, int slot,
                 const BlockedSignals& signals, const RankChannel* channel) {
  const pid_t starter = ::getpid();
  const pid_t process = ::fork();
  if (process != 0) return process;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != starter) std::_Exit(kCannotRun);  // the starter has died already
  signals.restore();
  ::setenv("TORCHELASTIC_RUN_ID", fmt::format("launch-{}", starter).c_str(), /*overwrite=*/1);
  for (const char* const of_outer_launcher :
       {"TORCHELASTIC_USE_AGENT_STORE", kSpareVariable, kSlotVariable})
    ::unsetenv(of_outer_launcher);
  if (channel) channel->hand_over(slot);
  become_rank(program, round, rank);
}

std::string newest_checkpoint_in(const std::string& folder) {
  try {
    if (folder.empty() || !has_checkpoint(folder)) return "no checkpoint has been saved";
    return fmt::format("the newest complete checkpoint is '{}'", find_checkpoint(folder));
  } catch (const FileError& error) {
    return fmt::format("the newest checkpoint cannot be determined: {}", error.what());
  }
}

std::string end_of_process(int status) {
  if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return fmt::format("was killed by signal {} ({})", signal, ::strsignal(signal));
}

}  // namespace lockstep
