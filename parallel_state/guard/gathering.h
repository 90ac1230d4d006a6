#pragma once

// Internal: waiting in a store.

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// Returns true once `key` is in `store`, false at `deadline` or when `give_up` says so. It polls,
/// less often the more ranks wait, because the store's own wait blocks the client for all other
/// threads and writes to standard error when it times out.
bool wait_for_key(c10d::Store& store, const std::string& key, int64_t ranks,
                  std::chrono::steady_clock::time_point deadline,
                  const std::function<bool()>& give_up = {});

/// Announces that `rank` is here. Call it once for each rank and store.
void note_here(c10d::Store& store, int64_t rank);

/// The ranks among `ranks` that have not announced themselves: "rank 3", "ranks 1, 3, 4"; at most
/// ten are listed. Makes up to a request for each rank; once `give_up` says so, it returns what it
/// has found.
struct AbsentRanks {
  std::string text;
  int64_t count = 0;
};
AbsentRanks absent_ranks(c10d::Store& store, const RankList& ranks,
                         const std::function<bool()>& give_up = {});

/// Returns nothing once all of `ranks` have called it with the same initially empty `store`;
/// otherwise returns why not: the ranks that did not arrive before `deadline`, or what `failure`,
/// which is called repeatedly, has found.
std::optional<std::string> gather(c10d::Store& store, const RankList& ranks, int64_t rank,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::function<std::optional<std::string>()>& failure);

}  // namespace lockstep
