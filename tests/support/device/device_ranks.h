#pragma once

#include "lockstep/tests/support/device/lagging_device.h"
#include "lockstep/tests/support/device/nccl_rules.h"
#include "lockstep/tests/support/rank_threads.h"

/// Ranks as threads of the test's process, as in rank_threads.h, on lagging devices: rank r has
/// device r, unless several ranks share one. Host data goes through Gloo, device tensors follow
/// NCCL's rules.
namespace lockstep::testing {

struct DeviceRankOptions {
  ParallelSizes sizes = {};  ///< world_size is filled in
  /// Timeout of the groups: their watchdogs report work that takes longer.
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  /// After this time everything is aborted, and the error names the hosts that were still blocked.
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
  /// When a rank throws, ranks that wait for it on their devices are released at once. Set to false
  /// where the product itself must release them.
  bool abort_on_error = true;
  /// Rank r has device r / ranks_per_device. With several ranks per device, each has its own
  /// current stream, as processes that share a GPU do. One limit: libtorch runs all backwards of a
  /// device on one thread of the process. A backward whose host blocks until another rank of the
  /// same device arrives, as in the first collective of a group, therefore never ends.
  int ranks_per_device = 1;
  LaggingDeviceOptions device = {};
  /// For looking at the counts of one run. Unless its on_timeout is set, overdue work aborts
  /// everything and becomes the error.
  std::shared_ptr<NcclRules> rules = {};
  CollectiveLog* log = nullptr;  ///< records every collective as it was called
  /// Called on the rank's thread for every collective, before it starts.
  CollectiveObserver observer = {};
};

/// Runs `body` on `world` ranks and returns when all have ended and their devices are idle. Throws
/// the first exception of any rank. Throws std::runtime_error for overdue work, for hosts that were
/// blocked at the deadline and for an error of a device. Throws UsageError for more ranks than the
/// devices take.
///
/// A rank's thread starts with the current device of any new thread: the product must make its own
/// device current.
void run_device_ranks(int64_t world, const RankBody& body, DeviceRankOptions options = {});

/// Like run_device_ranks, but returns the message that each rank threw, or "" for none. Errors of
/// devices stay in place, see device_error().
std::vector<std::string> errors_of_device_ranks(int64_t world, const RankBody& body,
                                                DeviceRankOptions options = {});

}  // namespace lockstep::testing
