#pragma once

// Internal.

#include <condition_variable>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>

#include <ATen/core/Tensor.h>

#include "lockstep/parallel_state/host_transfers.h"
#include "lockstep/parallel_state/pending.h"

namespace lockstep {

/// Messages between two ranks of a group on one host: the receiver reads the sender's memory. A
/// message is found by its identity, its number of bytes and its place among those of this kind, so
/// messages of different calls need not be received in the order in which they were sent. Up to
/// OfferBoard::kMostMessages can be found at a time, of those from one rank to another, or as many
/// as the system has memory for; later ones follow in their order.
///
/// A send that fails, or whose wait throws, withdraws this rank's memory: its caller may then
/// change or free what a receiver could still find.
///
/// The thread that waits for a message advances all that are under way. While nobody waits, a
/// thread of the messenger does so, every millisecond: a message that is sent and whose receive
/// has been posted arrives whatever its ranks do.
class HostMessenger {
 public:
  explicit HostMessenger(const DirectReading& reading) : reading_(reading) {}
  /// Abandons what is under way.
  ~HostMessenger();
  HostMessenger(const HostMessenger&) = delete;
  HostMessenger& operator=(const HostMessenger&) = delete;

  /// `tensor` is contiguous; it must keep its values until the message has been received.
  std::shared_ptr<Pending> send(const at::Tensor& tensor, int destination, uint64_t identity);
  std::shared_ptr<Pending> receive(const at::Tensor& tensor, int source, uint64_t identity);

 private:
  struct Message;
  struct Turns {
    uint64_t given = 0, posted = 0;
  };
  using Messages = std::list<std::shared_ptr<Message>>;

  std::shared_ptr<Pending> post(const at::Tensor& tensor, int peer, uint64_t identity, bool sends);
  /// Returns when the message has ended, or throws as Pending::wait().
  void wait_for(Message& message, const Waiting& waiting);
  void wait_for(const Message& message, const Waiting& waiting, std::unique_lock<std::mutex>& lock);
  void work();
  /// Ends all messages that can end. Needs the lock.
  void advance();
  bool advance(Message& message);
  void post_in_turn(Message& message);
  /// Ends a message that is not done; needs the lock.
  void abandon(Message& message, std::exception_ptr error);
  /// Ends those whose peers cannot answer any more. Needs the lock.
  void check_peers();

  const DirectReading reading_;

  std::mutex mutex_;
  std::condition_variable changed_;
  Messages under_way_;
  /// By peer, direction and identity. Both ends count, so it keeps one for each kind of message.
  std::map<std::tuple<int, bool, uint64_t>, uint64_t> next_;
  std::map<int, Turns> turns_;  ///< of the messages to send, by peer
  int waiting_ = 0;             ///< threads in wait_for()
  bool ended_ = false;
  std::thread worker_;
};

}  // namespace lockstep
