#include "lockstep/program/rank_processes.h"

#include <netinet/in.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/network.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kGrace{10};
constexpr int kFailed = 1;
constexpr int kRefused = 2;
constexpr int kStopped = 3;
constexpr int kDiverged = 4;

/// A port that nobody else is given while this object lives. Rank 0 can still listen on it, because
/// both sockets have SO_REUSEADDR and this one does not listen.
class ReservedPort {
 public:
  explicit ReservedPort(const std::string& address) : socket_(bound_socket(address, 0, false)) {}
  ~ReservedPort() { ::close(socket_); }
  ReservedPort(const ReservedPort&) = delete;
  ReservedPort& operator=(const ReservedPort&) = delete;

  int number() const {
    sockaddr_storage address = {};
    socklen_t size = sizeof address;
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &size);
    const auto* const v4 = reinterpret_cast<const sockaddr_in*>(&address);
    const auto* const v6 = reinterpret_cast<const sockaddr_in6*>(&address);
    return ntohs(address.ss_family == AF_INET ? v4->sin_port : v6->sin6_port);
  }

 private:
  int socket_;
};

/// Blocks the signals that Ranks::wait() takes, so that none is lost, for as long as it lives.
class BlockedSignals {
 public:
  BlockedSignals() {
    std::signal(SIGCHLD, SIG_DFL);
    sigemptyset(&taken_);
    sigaddset(&taken_, SIGCHLD);
    for (const int signal : {SIGTERM, SIGINT, SIGHUP})
      if (!is_ignored(signal)) sigaddset(&taken_, signal);
    sigprocmask(SIG_BLOCK, &taken_, &before_);
  }
  ~BlockedSignals() { restore(); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

  /// The next one; 0 where none has come by the deadline.
  int next(std::optional<Clock::time_point> deadline) const {
    for (;;) {
      const int signal =
          deadline ? next_within(*deadline - Clock::now()) : ::sigwaitinfo(&taken_, nullptr);
      if (signal > 0) return signal;
      if (errno == EAGAIN) return 0;
    }
  }

 private:
  static bool is_ignored(int signal) {
    struct sigaction action = {};
    ::sigaction(signal, nullptr, &action);
    return action.sa_handler == SIG_IGN;
  }
  int next_within(Clock::duration patience) const {
    const int64_t left = std::max<int64_t>(0, std::chrono::nanoseconds(patience).count());
    const timespec limit = {.tv_sec = left / 1'000'000'000, .tv_nsec = left % 1'000'000'000};
    return ::sigtimedwait(&taken_, nullptr, &limit);
  }

  sigset_t taken_, before_;
};

void set_variable(const char* name, const std::string& value) {
  ::setenv(name, value.c_str(), /*overwrite=*/1);
}

/// In the new process: becomes rank `rank`.
[[noreturn]] void become_rank(const LaunchedProgram& program, int rank, int restarts) {
  for (const char* const name : {"RANK", "LOCAL_RANK"}) set_variable(name, std::to_string(rank));
  for (const char* const name : {"WORLD_SIZE", "LOCAL_WORLD_SIZE"})
    set_variable(name, std::to_string(program.ranks));
  set_variable("MASTER_ADDR", program.master_address);
  set_variable("MASTER_PORT", std::to_string(program.master_port));
  set_variable("TORCHELASTIC_RUN_ID", fmt::format("launch-{}", ::getppid()));
  set_variable("TORCHELASTIC_RESTART_COUNT", std::to_string(restarts));
  ::unsetenv("TORCHELASTIC_USE_AGENT_STORE");  // of a launcher around this one
  std::vector<char*> arguments = {const_cast<char*>(program.file.c_str())};
  for (const std::string& argument : program.arguments)
    arguments.push_back(const_cast<char*>(argument.c_str()));
  arguments.push_back(nullptr);
  ::execvp(program.file.c_str(), arguments.data());
  std::fprintf(stderr, "lockstep launch: rank %d cannot run %s: %s\n", rank, program.file.c_str(),
               std::strerror(errno));
  std::_Exit(kFailed);
}

std::string end_of(int status) {
  if (WIFEXITED(status)) return fmt::format("exited with status {}", WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  return fmt::format("was killed by signal {} ({})", signal, ::strsignal(signal));
}

class Ranks {
 public:
  Ranks(const LaunchedProgram& program, int restarts) {
    const pid_t starter = ::getpid();
    for (int rank = 0; rank < program.ranks; ++rank) {
      const pid_t process = ::fork();
      if (process < 0) {
        const std::string reason = std::strerror(errno);
        send(SIGKILL);
        fail<UsageError>("launch: rank {} of {} cannot be started: {}", rank, program.ranks,
                         reason);
      }
      if (process == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (::getppid() != starter) std::_Exit(kFailed);  // it has died already
        signals_.restore();
        become_rank(program, rank, restarts);
      }
      processes_.push_back(process);
    }
    running_ = program.ranks;
  }

  int wait() {
    while (running_ > 0) {
      const int signal = signals_.next(deadline_);
      if (signal == SIGCHLD) {
        take_ended();
      } else if (signal > 0) {
        told_to_end_ = true;
        send(signal);
      } else {
        deadline_.reset();
        send(SIGKILL);
      }
    }
    return status_;
  }

  bool may_start_again() const { return failed_ && !told_to_end_ && status_ != kRefused; }

 private:
  void send(int signal) {
    for (const pid_t process : processes_)
      if (process > 0) ::kill(process, signal);
  }

  void take_ended() {
    int status = 0;
    for (pid_t process; (process = ::waitpid(-1, &status, WNOHANG)) > 0;) {
      const auto ended = std::find(processes_.begin(), processes_.end(), process);
      if (ended == processes_.end()) continue;  // as process 1 of a container
      *ended = 0;
      --running_;
      note_end(static_cast<int>(ended - processes_.begin()), process, status);
    }
  }

  void note_end(int rank, pid_t process, int status) {
    const int code = WIFEXITED(status) ? WEXITSTATUS(status) : kFailed;
    if (code == 0 || failed_) return;
    const bool with_the_others = code == kStopped || code == kDiverged;
    if (status_ == 0 || !with_the_others) status_ = code;
    if (with_the_others) return;
    failed_ = true;
    std::fprintf(stderr, "lockstep launch: rank %d (process %d) %s%s\n", rank,
                 static_cast<int>(process), end_of(status).c_str(),
                 running_ > 0 ? "; ending the other ranks" : "");
    deadline_ = Clock::now() + kGrace;
    send(SIGTERM);
  }

  BlockedSignals signals_;
  std::vector<pid_t> processes_;  ///< by rank; 0: it has ended
  int running_ = 0;
  bool failed_ = false;
  bool told_to_end_ = false;  ///< by a signal to this process
  int status_ = 0;
  std::optional<Clock::time_point> deadline_;  ///< of ranks that are to end
};

}  // namespace

int run_rank_processes(const LaunchedProgram& program) {
  for (int restarts = 0;; ++restarts) {
    LaunchedProgram started = program;
    std::optional<ReservedPort> port;
    if (started.master_port == 0)
      started.master_port = port.emplace(started.master_address).number();
    std::fflush(nullptr);
    Ranks ranks(started, restarts);
    const int status = ranks.wait();
    if (restarts == program.max_restarts || !ranks.may_start_again()) return status;
    std::fprintf(stderr, "lockstep launch: starting the ranks again (restart %d of %d)\n",
                 restarts + 1, program.max_restarts);
  }
}

}  // namespace lockstep
