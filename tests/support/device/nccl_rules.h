#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace lockstep::testing {

/// Calls of one kind in one group.
struct NcclCalls {
  int64_t calls = 0;
  int64_t bytes = 0;  ///< of the rank's inputs; for recv, of its output
  bool operator==(const NcclCalls&) const = default;
};

/// One rank's use of NCCL.
struct NcclCounts {
  /// By group and kind: "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter",
  /// "alltoall", "gather", "scatter", "send", "recv", "barrier".
  std::map<std::string, std::map<std::string, NcclCalls>> calls;
  int64_t kernels = 0;        ///< launches; a batch counts once
  int64_t communicators = 0;  ///< number created
  /// How often the host had to meet peers: once for every communicator, and for every launch that
  /// is the first to use a direction between two members.
  int64_t host_blocks = 0;
};

/// One job's use of NCCL, shared by the backends of all its ranks.
class NcclRules {
 public:
  /// Called by a watchdog for work that exceeds its timeout, with a message, on the watchdog's
  /// thread, once for each such work. Unset: prints the message on stderr and calls std::abort().
  /// Must be set before the first backend is created.
  std::function<void(const std::string&)> on_timeout;

  /// Counts of a global rank.
  NcclCounts counts(int64_t rank) const;
  /// Where hosts currently block: "rank 2, group pp[0, 2], first recv, 0 -> 2".
  std::vector<std::string> blocked_hosts() const;
  /// Aborts all backends of the job: releases every spinning kernel and every blocked host.
  void abort_all();

  /// From now on, every work that does not end has an error, as when NCCL loses a peer. As with
  /// c10d's works, a caller learns of it by asking whether the work has completed, and the kernel
  /// spins until its communicator is aborted.
  void report_errors(const std::string& text);
  std::string error() const;  ///< empty: none

  // The rest is for the backends.

  /// Changes the counts of `rank`.
  void note(int64_t rank, const std::function<void(NcclCounts&)>& change);
  /// abort_all() calls `abort` until leave(backend).
  void enter(const void* backend, std::function<void()> abort);
  void leave(const void* backend);

  /// A kernel of `rank` is on its device while this object lives.
  class OnDevice {
   public:
    OnDevice(NcclRules& rules, int64_t rank);
    ~OnDevice();
    OnDevice(const OnDevice&) = delete;
    OnDevice& operator=(const OnDevice&) = delete;

   private:
    NcclRules& rules_;
    int64_t rank_;
  };
  /// Blocks until no kernel of `rank` is on its device.
  void await_device(int64_t rank);

  /// Marks a host as blocked while this object lives.
  class HostBlock {
   public:
    HostBlock(NcclRules& rules, int64_t rank, const std::string& where);
    ~HostBlock();
    HostBlock(const HostBlock&) = delete;
    HostBlock& operator=(const HostBlock&) = delete;

   private:
    NcclRules& rules_;
    int64_t rank_;
  };

 private:
  mutable std::mutex mutex_;
  std::map<int64_t, NcclCounts> counts_;
  std::condition_variable kernel_ended_;
  std::map<int64_t, int> on_device_;  ///< kernels, by rank
  std::string error_;
  std::map<int64_t, std::vector<std::string>> blocked_;  ///< by rank, in order of entry
  std::mutex backends_mutex_;  ///< held while they are aborted, so that none leaves meanwhile
  std::map<const void*, std::function<void()>> backends_;
};

}  // namespace lockstep::testing
