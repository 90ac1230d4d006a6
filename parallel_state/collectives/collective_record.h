#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// One call of a collective by one rank, as it was made.
struct CollectiveRecord {
  enum class Kind {
    collective,         ///< the same on all ranks of the group
    uneven_collective,  ///< whose number of elements differs between ranks
    send,
    receive,
  };

  int64_t rank = 0;       ///< global rank that made the call
  std::string group;      ///< name of the group's kind: "dp-cp", "world"
  RankList ranks;         ///< global ranks of the group, in its order
  std::string operation;  ///< "all_reduce (sum)", "broadcast (from 0)", "all_gather", ...
  std::string label;      ///< what is communicated: "bucket 3 ('a' to 'b')"
  std::string dtype;      ///< "Float"
  int64_t numel = 0;      ///< elements of the rank's input
  int64_t bytes = 0;      ///< of the rank's input
  Kind kind = Kind::collective;
  int64_t peer = -1;  ///< global rank at the other end of a message; -1: a collective

  bool operator==(const CollectiveRecord&) const = default;
};

/// Called on the calling thread for every collective of a rank in a group of several ranks, before
/// the collective starts.
using CollectiveObserver = std::function<void(const CollectiveRecord&)>;

}  // namespace lockstep
