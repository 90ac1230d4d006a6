#pragma once

#include <fmt/format.h>
#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/copy_holders.h"
#include "lockstep/parallel_state/launch_channel.h"

namespace lockstep {

/// A process of `lockstep launch`: a rank, or a spare.
struct RankMember {
  pid_t process = 0;      ///< 0: it has ended
  int rank = 0;           ///< in this round; below 0: none, it is a spare
  int slot = 0;           ///< of its process, for its whole life; see kSlotVariable
  bool waits = false;     ///< for the next round
  bool stopped = false;   ///< by a signal
  bool is_spare = false;  ///< in the round that begins
  std::vector<HeldCopy> copies = {};
  std::unique_ptr<RankChannel> channel;

  bool runs() const { return process > 0; }
  /// A spare whose process is not ready yet. Without a channel it is about to end.
  bool starts() const { return runs() && !waits && rank < 0 && channel; }
  bool trains() const { return runs() && !waits && !starts(); }
  bool is_stopped() const { return runs() && stopped && !starts(); }
  std::string name() const { return rank < 0 ? "a spare rank" : fmt::format("rank {}", rank); }
};

/// Slots of running members: two of them never share a device.
class SlotPool {
 public:
  /// The first one that is free.
  int take();
  void give_back(int slot) { returned_.insert(slot); }

 private:
  int next_ = 0;  ///< no slot from here on was ever taken
  std::set<int> returned_;
};

/// Waits until `descriptor` or a channel of a member can be read, at most `patience` milliseconds
/// (negative: as long as it takes). Returns the members whose channel can be read, also if a signal
/// ends the wait; nothing after the patience. UsageError if the system refuses.
std::optional<std::vector<RankMember*>> wait_for_words(std::vector<RankMember>& members,
                                                       int descriptor, int patience);

/// Swaps each of the first `ranks` members that has ended with a waiting spare from those after
/// them, as long as there are any. The remaining ranks keep their positions. Returns the number of
/// swaps.
int64_t put_spares_in_place(std::vector<RankMember>& members, int ranks);

/// Sorts the members so that `count` of those that wait come first, in the order of their ranks:
/// those that together hold a whole copy of the state, if any do. Then come the spares, those that
/// wait first, and finally the members that have ended.
void put_first(std::vector<RankMember>& members, size_t count);

}  // namespace lockstep
