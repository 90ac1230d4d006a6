#include "lockstep/program/signals.h"

#include <poll.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <csignal>
#include <ctime>
#include <string_view>

namespace lockstep {
namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free);
static_assert(std::atomic<int>::is_always_lock_free);

std::atomic<int> noted = 0;
std::atomic<int64_t> noted_at = 0;  ///< milliseconds
std::atomic<int> awaited = -1;      ///< descriptor; -1: none
std::atomic<int> exit_status = 0;

int64_t now() {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

/// May be called in a signal handler.
bool nothing_to_read(int descriptor) {
  const int error = errno;
  pollfd polled = {.fd = descriptor, .events = POLLIN, .revents = 0};
  const bool nothing = ::poll(&polled, 1, 0) == 0;
  errno = error;
  return nothing;
}

extern "C" void on_stop_signal(int signal) {
  constexpr int64_t kSameEvent = 1000;  // milliseconds
  if (const int descriptor = awaited; descriptor >= 0 && nothing_to_read(descriptor)) return;
  if (noted == 0) {
    noted_at = now();
    noted = signal;
  } else if (now() - noted_at >= kSameEvent) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

extern "C" void on_last_signal(int /*signal*/) {
  constexpr std::string_view kTold = "stopped by a signal after training had ended\n";
  (void)!::write(STDERR_FILENO, kTold.data(), kTold.size());
  ::_exit(exit_status);
}

bool is_ignored(int signal) {
  struct sigaction action = {};
  return ::sigaction(signal, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

/// Leaves it alone if the process was started with the signal ignored.
void handle(int signal, void (*handler)(int)) {
  static const bool ignores_sigterm = is_ignored(SIGTERM), ignores_sigint = is_ignored(SIGINT);
  if (signal == SIGTERM ? ignores_sigterm : ignores_sigint) return;
  std::signal(signal, handler);
}

}  // namespace

void note_sigterm() { handle(SIGTERM, on_stop_signal); }

void note_sigint() { handle(SIGINT, on_stop_signal); }

void note_signals_only_beside(int descriptor) { awaited = descriptor; }

void note_all_signals() { awaited = -1; }

int noted_signal() { return noted; }

void forget_noted_signal() { noted = 0; }

void ignore_signals() {
  handle(SIGTERM, SIG_IGN);
  handle(SIGINT, SIG_IGN);
}

void exit_on_signals(int status) {
  exit_status = status;
  handle(SIGTERM, on_last_signal);
  handle(SIGINT, on_last_signal);
}

}  // namespace lockstep
