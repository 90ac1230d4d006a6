#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/testing/collective_log.h"

/// Ranks as threads of the test's process: each has its own ParallelState over one store in memory
/// and Gloo on loopback.
namespace lockstep::testing {

struct RankThreadOptions {
  ParallelSizes sizes = {};  ///< world_size is filled in
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  CollectiveLog* log = nullptr;       ///< records every collective, as it was called
  BackendLog* backend_log = nullptr;  ///< records what the backends are asked to do
  /// Is called on the rank's thread with every collective, before it starts.
  CollectiveObserver observer = {};
  /// Changes the options that the rank's ParallelState is made with.
  std::function<void(int64_t rank, ParallelStateOptions&)> adjust = {};
};

using RankBody = std::function<void(const ParallelState&)>;

/// Runs `body` on `world` rank threads and returns when all have ended. The first exception of any
/// rank, of any type, is rethrown here; the other ranks learn of it and end soon.
void run_ranks(int64_t world, const RankBody& body, RankThreadOptions options = {});

/// Like run_ranks, but returns what each rank threw: its message, or "" for none.
std::vector<std::string> errors_of_ranks(int64_t world, const RankBody& body,
                                         RankThreadOptions options = {});

}  // namespace lockstep::testing
