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

  /// Becomes readable when one has come.
  int descriptor() const { return descriptor_; }
  /// The next one; 0 where none has come.
  int next() const;
  /// In a new process: they do there what they did before.
  void restore() const { sigprocmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t taken_, before_;
  int descriptor_;
};

}  // namespace lockstep
