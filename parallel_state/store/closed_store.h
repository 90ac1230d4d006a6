#pragma once

// Internal. No libtorch here.

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>

#include "lockstep/parallel_state/key_values.h"
#include "lockstep/parallel_state/secret_proof.h"

namespace lockstep {

/// What connections may cost that have not proved that they know the secret.
struct DoorLimits {
  std::chrono::milliseconds patience{5000};  ///< for the proof
  size_t waiting = 128;  ///< at once; one more, and the one that has waited longest is closed
};

/// Serves a c10d::TCPStore's requests, on a thread of its own, to connections that have proved that
/// they know a secret; the others reach nothing but the proof. One epoll loop serves them all.
/// libtorch's server would take whoever reaches its port, on loopback too, and takes no connection
/// that another has accepted.
class ClosedStore {
 public:
  /// What the store itself writes: how many connections were closed without a proof. A store of
  /// libtorch has no such name.
  static constexpr char kRefusedConnections[] = "connections without the secret";

  /// `bound`: a bound socket, which this owns from now on. CommunicationError: another listens
  /// there, or the system has no more descriptors.
  ClosedStore(int bound, std::shared_ptr<const Secret> secret, DoorLimits limits = {});
  ~ClosedStore() { close(); }
  ClosedStore(const ClosedStore&) = delete;
  ClosedStore& operator=(const ClosedStore&) = delete;

  int64_t refused() const { return refused_; }
  /// Closes all connections; those that have not proved it yet are refused ones too.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using Number = uint64_t;  ///< of a connection: in the order in which they came

  struct Guest {
    int socket = -1;
    Clock::time_point came;
    ProofOfClient proof;
    bool proved = false;
    bool reads = true;  ///< is waited for to send, rather than to receive
    std::string in, out;
  };

  void run();
  int milliseconds_to_wait() const;
  void accept_one();
  void welcome(int socket);
  void close_late();
  void leave(Number number);

  /// Each returns whether the connection goes on.
  bool serve(Number number, Guest& guest);
  bool receive(Guest& guest);
  bool check_proof(Number number, Guest& guest);
  bool answer_requests(Guest& guest);
  bool send(Guest& guest);

  void watch(int operation, int socket, uint32_t events, Number number) const;

  int listener_, epoll_, stop_;
  std::shared_ptr<const Secret> secret_;
  DoorLimits limits_;
  std::atomic<int64_t> refused_ = 0;
  Clock::time_point listens_again_{};  ///< after the system had no more descriptors
  Number next_;
  std::unordered_map<Number, Guest> guests_;
  std::set<Number> waiting_;  ///< for their proof; the first has waited longest
  KeyValues values_;
  std::array<char, 1 << 16> buffer_;  ///< of bytes that have just come
  std::thread thread_;
};

/// "17 connections without the secret were refused"
std::string refused_connections(int64_t number);

}  // namespace lockstep
