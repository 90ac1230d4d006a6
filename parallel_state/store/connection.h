#pragma once

// Internal. No libtorch here.

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lockstep {

/// A TCP connection whose every step ends by a deadline, whatever has become of the other side.
/// send(), receive() and close() are for one thread at a time; state() and interrupt() for any.
class Connection {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  enum class State {
    none,   ///< not connected, or given up after a deadline
    open,   ///< connected, as far as one can see from here
    ended,  ///< the other side has closed it, or nobody listens there: its process has ended
  };

  /// Why a step failed: the other side has ended, or the deadline has passed.
  struct Ended : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  struct Silent : std::runtime_error {
    using std::runtime_error::runtime_error;
  };

  Connection() = default;
  ~Connection() { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Connects unless that is done already; returns whether it did. An ended one stays so. A name is
  /// looked up once.
  bool open(const std::string& host, int port, Deadline deadline);
  void send(const std::string& bytes, Deadline deadline);
  void receive(void* to, size_t bytes, Deadline deadline);
  /// Gives up what may still arrive; open() connects anew.
  void close();

  /// Looks at the socket; costs one system call.
  State state();
  /// Ends, for ever, all steps that wait and all that come.
  void interrupt();

 private:
  void await(short events, Deadline deadline);
  [[noreturn]] void fail_step(int error);
  int socket() const;

  mutable std::mutex mutex_;  ///< of what follows; held for no longer than a system call
  int socket_ = -1;
  bool ended_ = false;
  bool broken_ = false;  ///< by the network, not by the other side
  bool interrupted_ = false;
  std::string found_at_;  ///< the address that a name has led to
};

}  // namespace lockstep
