#pragma once

// Internal: waiting in a store.

#include <chrono>
#include <functional>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// Returns true once `key` is in `store`, false at `deadline` or when `give_up` says so. Asks now
/// and then, the more rarely the more ranks wait, because the store's own wait blocks the client
/// for all other threads and complains on standard error when its time is over.
bool wait_for_key(c10d::Store& store, const std::string& key, int64_t ranks,
                  std::chrono::steady_clock::time_point deadline,
                  const std::function<bool()>& give_up = {});

/// Says that `rank` is here. Once for each rank and store.
void note_here(c10d::Store& store, int64_t rank);

/// Those of `ranks` that have not said so: "rank 3", "ranks 1, 3, 4"; ten are listed at most.
struct AbsentRanks {
  std::string text;
  int64_t count = 0;
};
AbsentRanks absent_ranks(c10d::Store& store, const RankList& ranks);

/// Returns nothing once all of `ranks` have called it with the same empty `store`; else why not:
/// the ranks that did not come before `deadline`, or what `failure`, called now and then, has
/// found.
std::optional<std::string> gather(c10d::Store& store, const RankList& ranks, int64_t rank,
                                  std::chrono::steady_clock::time_point deadline,
                                  const std::function<std::optional<std::string>()>& failure);

}  // namespace lockstep
