#pragma once

#include <csignal>

namespace lockstep {

/// While it lives, SIGCHLD and, unless this process ignores them, SIGTERM, SIGINT and SIGHUP wait
/// until they are taken, so that none is lost.
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
  /// Call it in a new process: restores the signal mask from before.
  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t taken_, before_;
  int descriptor_;
};

}  // namespace lockstep
