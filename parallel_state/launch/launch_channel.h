#pragma once

// Internal. No libtorch here.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/parallel_state/launch_environment.h"

/// How `lockstep launch` and the ranks of an elastic run speak. The ranks of a run meet in rounds:
/// where a round has lost a rank, those that are left tell the launcher so and wait, and it tells
/// them who they are in the next round. Each message is a datagram of a socket pair, one end of
/// which the rank finds by its descriptor in LOCKSTEP_LAUNCH_CHANNEL.
namespace lockstep {

/// Where set, this process is a spare of a run of so many ranks: it takes part in no round before
/// the launcher tells it to.
inline constexpr char kSpareVariable[] = "LOCKSTEP_SPARE_OF";

/// Environment variables and their values.
using VariableList = std::vector<std::pair<std::string, std::string>>;

/// What a rank says that waits for the next round.
struct WaitingRank {
  /// Numbers of ranks that its configuration fits, the largest first.
  std::vector<int64_t> world_sizes;
  std::string limits;       ///< the fields that say so, for messages; one line
  std::string copies = {};  ///< what it has in memory, as format_held_copies() tells it
};

/// What the launcher answers.
struct LaunchOrder {
  VariableList round;         ///< of the next round, in place of those of the environment
  std::optional<int> status;  ///< instead: the rank is to end with it
  std::string reason;         ///< why it ends; empty where the run is over
};

/// One end of a socket pair of messages.
class MessageSocket {
 public:
  explicit MessageSocket(int descriptor) : descriptor_(descriptor) {}
  ~MessageSocket();
  MessageSocket(const MessageSocket&) = delete;
  MessageSocket& operator=(const MessageSocket&) = delete;

  int descriptor() const { return descriptor_; }
  /// Returns whether the other end takes it. Does not block: an end that reads nothing loses what
  /// does not fit.
  bool send(const std::string& message) const;
  enum class Wait { no, until_there };
  /// The next message; nothing where there is none, or the other end has gone. `keep`: it stays the
  /// next one.
  std::optional<std::string> receive(Wait wait, bool keep = false) const;

 private:
  int descriptor_;
};

/// A rank's end.
class LaunchChannel {
 public:
  explicit LaunchChannel(int descriptor) : socket_(descriptor) {}
  /// The one that the launcher gave to this process; null where it gave none.
  static std::unique_ptr<LaunchChannel> of_this_process();
  /// How many ranks the run has of which this process is a spare; 0 where it is a rank from the
  /// start. A spare waits for an order before its first round.
  static int spare_of();

  /// Says how long this rank waits for others before it takes them for lost, and where it saves;
  /// empty: nowhere.
  void announce(std::chrono::milliseconds timeout, const std::string& folder) const;
  /// Why the launcher takes the present round for over; nothing while it does not. Costs one system
  /// call.
  std::optional<std::string> round_is_over() const;
  /// Says that this rank has left its round, and waits for what comes next. The launcher bounds the
  /// wait, and ends its ranks when it ends. CommunicationError: it has gone.
  LaunchOrder wait_for_order(const WaitingRank& rank) const;

 private:
  MessageSocket socket_;
};

/// The launcher's end.
class RankChannel {
 public:
  /// UsageError: the system has no more descriptors.
  RankChannel();

  /// In the new process, before it becomes the rank: gives it the other end.
  void hand_over() const;
  /// In the launcher, once the rank's process is there.
  void keep_own_end() { rank_end_.reset(); }
  int descriptor() const { return own_->descriptor(); }

  void tell_round_is_over(const std::string& reason) const;
  void give(const LaunchOrder& order) const;

  /// What a rank has said: a timeout with a folder, or that it waits.
  struct Word {
    std::optional<std::chrono::milliseconds> timeout;
    std::string folder = {};
    std::optional<WaitingRank> waits;
  };
  /// The next one; nothing where there is none.
  std::optional<Word> receive() const;

 private:
  std::unique_ptr<MessageSocket> own_, rank_end_;
};

/// Reads `variables` and, where they have none of that name, `environment`.
EnvironmentReader over(VariableList variables, EnvironmentReader environment);

}  // namespace lockstep
