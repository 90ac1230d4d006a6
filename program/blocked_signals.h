#pragma once

#include <csignal>

namespace lockstep {

/// While it lives, SIGCHLD and, unless this process ignores them, SIGTERM, SIGINT and SIGHUP wait
/// until they are taken, so that none is lost. SIGPIPE is ignored: if nobody reads what this
/// process tells any more, the processes that it has started go on.
class BlockedSignals {
 public:
  BlockedSignals();
  ~BlockedSignals();
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

  /// Becomes readable when a signal has arrived.
  int descriptor() const { return descriptor_; }
  /// The next signal; 0 if none has arrived.
  int next() const;
  /// Call it in a new process: signals are blocked and ignored as before.
  void restore() const;

 private:
  sigset_t taken_, before_;
  struct sigaction pipe_before_ = {};
  int descriptor_;
};

}  // namespace lockstep
