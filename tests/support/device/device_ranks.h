#pragma once

#include "lockstep/tests/support/device/lagging_device.h"
#include "lockstep/tests/support/device/nccl_rules.h"
#include "lockstep/tests/support/rank_threads.h"

/// Ranks as threads of the test's process, as in rank_threads.h, on lagging devices: rank r has
/// device r, unless several share one. Host data goes over Gloo, tensors of the device by NCCL's
/// rules.
namespace lockstep::testing {

struct DeviceRankOptions {
  ParallelSizes sizes = {};  ///< world_size is filled in
  /// Of the groups: their watchdogs report work that takes longer.
  std::chrono::milliseconds timeout = std::chrono::seconds(20);
  /// After it everything is aborted, and the ranks that still were blocked are named.
  std::chrono::milliseconds deadline = std::chrono::seconds(120);
  /// Ranks that wait on their devices for one that has thrown are released at once. Not where the
  /// product itself has to see to it.
  bool abort_on_error = true;
  /// Rank r has device r / ranks_per_device. With several each has a current stream of its own, as
  /// processes have that share a GPU. One thing they cannot have: libtorch runs the backwards of a
  /// device on one thread of the process, so a backward whose host blocks until another rank of
  /// the device comes, as in the first collective of a group, never ends.
  int ranks_per_device = 1;
  LaggingDeviceOptions device = {};
  /// To look at the counts, of one run. Unless its on_timeout is set, an overdue work aborts
  /// everything and is the error.
  std::shared_ptr<NcclRules> rules = {};
  CollectiveLog* log = nullptr;  ///< notes every collective, as it was called
  /// Is called on the rank's thread with every collective, before it starts.
  CollectiveObserver observer = {};
};

/// Runs `body` on `world` ranks and returns when all have ended and their devices are at rest.
/// Throws the first exception of any rank, or std::runtime_error: work that was overdue, hosts that
/// were blocked at the deadline, an error of a device. UsageError for more ranks than the devices
/// take.
///
/// The current device of a rank's thread is what a new thread has: to make its own device current
/// is the product's business.
void run_device_ranks(int64_t world, const RankBody& body, DeviceRankOptions options = {});

/// Like run_device_ranks, but returns what each rank threw: its message, or "" for none. Errors of
/// devices stay there, see device_error().
std::vector<std::string> errors_of_device_ranks(int64_t world, const RankBody& body,
                                                DeviceRankOptions options = {});

}  // namespace lockstep::testing
