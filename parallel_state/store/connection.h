#pragma once

// Internal. No libtorch here.

#include <chrono>
#include <mutex>
#include <stdexcept>
#include <string>

namespace lockstep {

/// A TCP connection on which every step ends by a deadline, whatever happened to the other side and
/// however many addresses its name has. (Only looking up a name may take longer.) Only one thread
/// at a time may call send(), receive() and close(); any thread may call state() and interrupt().
class Connection {
 public:
  using Deadline = std::chrono::steady_clock::time_point;

  enum class State {
    none,   ///< not connected, or given up after a deadline
    open,   ///< connected, as far as this side can tell
    ended,  ///< the other side has closed it once settled, or nobody listens there: its process
            ///< has ended
  };

  /// Why a step failed: the other side has ended; or it has not answered, by the deadline or
  /// because it cannot be found or reached.
  struct Ended : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  struct Silent : std::runtime_error {
    using std::runtime_error::runtime_error;
  };
  /// The other side has closed the connection before settle(); open() connects again.
  struct TurnedAway : Ended {
    using Ended::Ended;
  };
  /// This process has no descriptor left for a socket; the other side may be well.
  struct NoSocket : Silent {
    using Silent::Silent;
  };

  Connection() = default;
  ~Connection() { close(); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  /// Connects unless already connected; returns whether it did. An ended connection stays ended. A
  /// host name is looked up once, and the address that answered is used from then on.
  bool open(const std::string& host, int port, Deadline deadline);
  /// The other side has let this one in. Until then it may close the connection for other reasons
  /// than its end, such as too many strangers.
  void settle();
  void send(const std::string& bytes, Deadline deadline);
  void receive(void* to, size_t bytes, Deadline deadline);
  /// Discards what may still arrive; open() connects again.
  void close();

  /// Looks at the socket; costs one system call.
  State state();
  /// Permanently ends all steps, those that are waiting and all later ones.
  void interrupt();

 private:
  void await(short events, Deadline deadline);
  [[noreturn]] void fail_step(int error);
  int socket() const;

  mutable std::mutex mutex_;  ///< for the following members; held for no longer than a system call
  int socket_ = -1;
  bool settled_ = false;
  bool ended_ = false;
  bool broken_ = false;  ///< by the network, not by the other side
  bool interrupted_ = false;
  std::string found_at_;  ///< the address that answered
};

}  // namespace lockstep
