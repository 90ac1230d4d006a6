#include "lockstep/program/blocked_signals.h"

#include <sys/signalfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

bool is_ignored(int signal) {
  struct sigaction action = {};
  ::sigaction(signal, nullptr, &action);
  return action.sa_handler == SIG_IGN;
}

}  // namespace

BlockedSignals::BlockedSignals() {
  std::signal(SIGCHLD, SIG_DFL);
  sigemptyset(&taken_);
  sigaddset(&taken_, SIGCHLD);
  for (const int signal : {SIGTERM, SIGINT, SIGHUP})
    if (!is_ignored(signal)) sigaddset(&taken_, signal);
  sigprocmask(SIG_BLOCK, &taken_, &before_);
  struct sigaction ignore = {};
  ignore.sa_handler = SIG_IGN;
  ::sigaction(SIGPIPE, &ignore, &pipe_before_);
  descriptor_ = ::signalfd(-1, &taken_, SFD_CLOEXEC | SFD_NONBLOCK);
  require<UsageError>(descriptor_ >= 0, "launch: no descriptor for signals: {}",
                      std::strerror(errno));
}

BlockedSignals::~BlockedSignals() {
  ::close(descriptor_);
  restore();
}

void BlockedSignals::restore() const {
  ::sigaction(SIGPIPE, &pipe_before_, nullptr);
  sigprocmask(SIG_SETMASK, &before_, nullptr);
}

int BlockedSignals::next() const {
  const timespec now = {};
  return std::max(0, ::sigtimedwait(&taken_, nullptr, &now));
}

}  // namespace lockstep
