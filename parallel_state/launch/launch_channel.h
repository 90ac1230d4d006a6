#pragma once

// Internal. No libtorch here.

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel_state/launch_environment.h"

/// How `lockstep launch` and the ranks of an elastic run communicate. The ranks of a run meet in
/// rounds: if a round has lost a rank, the remaining ranks report that to the launcher and wait,
/// and it tells them which ranks they are in the next round. Each message is a datagram on a socket
/// pair; the rank finds its end through the descriptor in LOCKSTEP_LAUNCH_CHANNEL.
namespace lockstep {

/// If set, this process is a spare of a run with that many ranks: it takes part in no round before
/// the launcher tells it to.
inline constexpr char kSpareVariable[] = "LOCKSTEP_SPARE_OF";

/// The position of this process among those of an elastic run on its host, which picks its device.
/// Unlike LOCAL_RANK it belongs to the process: a spare keeps it in the place of a lost rank, and a
/// process that starts later gets one that no other has.
inline constexpr char kSlotVariable[] = "LOCKSTEP_LAUNCH_SLOT";

/// Environment variables and their values.
using VariableList = std::vector<std::pair<std::string, std::string>>;

/// The report of a rank that waits for the next round.
struct WaitingRank {
  /// World sizes that its configuration fits, the largest first.
  std::vector<int64_t> world_sizes;
  std::string limits;       ///< the fields that decide this, for messages; one line
  std::string copies = {};  ///< what it has in memory, as written by format_held_copies()
};

/// The launcher's answer.
struct LaunchOrder {
  VariableList round;         ///< of the next round, overriding those of the environment
  std::optional<int> status;  ///< instead of a round: the rank is to exit with it
  std::string reason;         ///< why it ends; empty if the run is over
};

/// One end of a socket pair of messages.
class MessageSocket {
 public:
  explicit MessageSocket(int descriptor) : descriptor_(descriptor) {}
  ~MessageSocket();
  MessageSocket(const MessageSocket&) = delete;
  MessageSocket& operator=(const MessageSocket&) = delete;

  int descriptor() const { return descriptor_; }
  /// Returns whether the other end accepts it. Does not block: if the other end does not read, it
  /// loses what does not fit.
  bool send(const std::string& message) const;
  enum class Wait { no, until_there };
  /// The next message; nothing if there is none, or if the other end has gone. `keep`: it stays the
  /// next one.
  std::optional<std::string> receive(Wait wait, bool keep = false) const;

 private:
  int descriptor_;
};

/// A rank's end.
class LaunchChannel {
 public:
  explicit LaunchChannel(int descriptor) : socket_(descriptor) {}
  int descriptor() const { return socket_.descriptor(); }
  /// The channel that the launcher gave to this process; null if it gave none.
  static std::unique_ptr<LaunchChannel> of_this_process();
  /// If this process is a spare, the number of ranks of the run; 0 if it is a rank from the start.
  /// A spare waits for an order before its first round.
  static int spare_of();
  /// `environment` with this process's slot as the local rank, and with enough ranks on this host
  /// for it: to choose the device by.
  static LaunchEnvironment in_slot(LaunchEnvironment environment);

  /// Reports how long this rank waits for others before it considers them lost, and where it saves;
  /// empty: nowhere.
  void announce(std::chrono::milliseconds timeout, const std::string& folder) const;
  /// Why the launcher considers the current round over; nothing while it does not. Costs one system
  /// call.
  std::optional<std::string> round_is_over() const;
  /// Reports that this rank has left its round, and waits for the next order. The launcher bounds
  /// the wait, and ends its ranks when it ends. `arrived` is called once the order can be read from
  /// the descriptor, and before it is read. CommunicationError: the launcher has exited.
  LaunchOrder wait_for_order(const WaitingRank& rank,
                             const std::function<void()>& arrived = {}) const;

 private:
  MessageSocket socket_;
};

/// The launcher's end.
class RankChannel {
 public:
  /// UsageError: the system has no more descriptors.
  RankChannel();

  /// Call it in the new process, before it becomes the rank: gives it the other end and its slot.
  void hand_over(int slot) const;
  /// Call it in the launcher, once the rank's process exists.
  void keep_own_end() { rank_end_.reset(); }
  int descriptor() const { return own_->descriptor(); }

  void tell_round_is_over(const std::string& reason) const;
  void give(const LaunchOrder& order) const;

  /// A report of a rank: a timeout with a folder, or that it waits.
  struct Word {
    std::optional<std::chrono::milliseconds> timeout;
    std::string folder = {};
    std::optional<WaitingRank> waits;
  };
  /// The next one; nothing if there is none.
  std::optional<Word> receive() const;

 private:
  std::unique_ptr<MessageSocket> own_, rank_end_;
};

/// Reads `variables` and, for names that they do not have, `environment`.
EnvironmentReader over(VariableList variables, EnvironmentReader environment);

}  // namespace lockstep
