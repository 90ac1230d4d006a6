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

/// Limits for connections that have not proved that they know the secret.
struct DoorLimits {
  std::chrono::milliseconds patience{5000};  ///< for the proof
  size_t waiting = 128;  ///< at once; if one more comes, the one that has waited longest is closed
};

/// Serves a c10d::TCPStore's requests, on its own thread, to connections that have proved that they
/// know a secret; the others reach nothing but the proof. One epoll loop serves them all.
/// libtorch's server would serve anyone who reaches its port, on loopback too, and cannot take over
/// a connection that was accepted elsewhere.
class ClosedStore {
 public:
  /// A key that the store itself writes: how many connections it has refused. libtorch's store has
  /// no such key.
  static constexpr char kRefusedConnections[] = "connections without the secret";

  /// `bound`: a bound socket, which this object then owns. CommunicationError: another process
  /// listens there, or the system has no more descriptors.
  ClosedStore(int bound, std::shared_ptr<const Secret> secret, DoorLimits limits = {});
  ~ClosedStore() { close(); }
  ClosedStore(const ClosedStore&) = delete;
  ClosedStore& operator=(const ClosedStore&) = delete;

  /// The connections that the store has closed before their proof. One whose other end leaves
  /// without a word, or before it is greeted, does not count: it may be a rank that gave up while
  /// this process was suspended.
  int64_t refused() const { return refused_; }
  /// Closes all connections; those that have not completed the proof count as refused, too.
  void close();

 private:
  using Clock = std::chrono::steady_clock;
  using Number = uint64_t;  ///< of a connection, in order of arrival

  struct Guest {
    int socket = -1;
    Clock::time_point came;
    ProofOfClient proof;
    bool proved = false;
    bool spoke = false;  ///< has sent something
    bool left = false;   ///< of its own accord
    bool reads = true;   ///< the server waits for it to send, rather than to receive
    std::string in, out;
  };

  void close_descriptors() const;
  void run();
  int milliseconds_to_wait() const;
  void accept_one();
  void welcome(int socket);
  void close_late();
  void leave(Number number);

  /// Each returns whether the connection stays open.
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
  bool told_of_obstacle_ = false;      ///< that it cannot accept connections
  Clock::time_point listens_again_{};  ///< after the system had run out of descriptors
  Number next_;
  std::unordered_map<Number, Guest> guests_;
  std::set<Number> waiting_;  ///< for their proof; the first has waited longest
  KeyValues values_;
  std::array<char, 1 << 16> buffer_;  ///< bytes that have just arrived
  std::thread thread_;
};

/// "17 connections without the secret were refused"
std::string refused_connections(int64_t number);

}  // namespace lockstep
