#include "lockstep/program/signals.h"

#include <atomic>
#include <csignal>
#include <ctime>

namespace lockstep {
namespace {

static_assert(std::atomic<int64_t>::is_always_lock_free);

std::atomic<int> noted = 0;
std::atomic<int64_t> noted_at = 0;  ///< milliseconds

int64_t now() {
  timespec time = {};
  ::clock_gettime(CLOCK_MONOTONIC, &time);
  return int64_t{time.tv_sec} * 1000 + time.tv_nsec / 1'000'000;
}

extern "C" void on_stop_signal(int signal) {
  constexpr int64_t kSameEvent = 1000;  // milliseconds
  if (noted == 0) {
    noted_at = now();
    noted = signal;
  } else if (now() - noted_at >= kSameEvent) {
    std::signal(signal, SIG_DFL);
    std::raise(signal);
  }
}

}  // namespace

void note_sigterm() { std::signal(SIGTERM, on_stop_signal); }

void note_sigint() { std::signal(SIGINT, on_stop_signal); }

int noted_signal() { return noted; }

void ignore_signals() {
  std::signal(SIGTERM, SIG_IGN);
  std::signal(SIGINT, SIG_IGN);
}

}  // namespace lockstep
