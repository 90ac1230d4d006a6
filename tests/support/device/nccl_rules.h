#pragma once

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
  int64_t bytes = 0;  ///< of the rank's inputs; of a recv, of its output
  bool operator==(const NcclCalls&) const = default;
};

/// What one rank has done with NCCL.
struct NcclCounts {
  /// By group and kind: "allreduce", "reduce", "broadcast", "allgather", "reduce_scatter",
  /// "alltoall", "gather", "scatter", "send", "recv", "barrier".
  std::map<std::string, std::map<std::string, NcclCalls>> calls;
  int64_t kernels = 0;        ///< launches; a batch is one
  int64_t communicators = 0;  ///< that were made
  /// Times that the host had to meet peers: for every communicator, and for every launch that uses
  /// a direction between two of its members for the first time.
  int64_t host_blocks = 0;
};

/// One job's use of NCCL, which the backends of all its ranks share.
class NcclRules {
 public:
  /// What a watchdog does about work that exceeds its timeout: it gets the message, on its own
  /// thread, once for every such work. Unset: the message on stderr, and std::abort(). To be set
  /// before the first backend is made.
  std::function<void(const std::string&)> on_timeout;

  /// Of a global rank.
  NcclCounts counts(int64_t rank) const;
  /// Where hosts block at this moment: "rank 2, group pp[0, 2], first recv, 0 -> 2".
  std::vector<std::string> blocked_hosts() const;
  /// Aborts all backends of the job: every kernel that spins and every host that blocks goes on.
  void abort_all();

  /// From now on every work that does not end has an error, as where NCCL finds a peer gone. Like
  /// with c10d's works, whoever asks whether it has completed learns of it, and the kernel spins
  /// until its communicator is aborted.
  void report_errors(const std::string& text);
  std::string error() const;  ///< empty: none

  // What follows is for the backends.

  /// Changes the counts of `rank`.
  void note(int64_t rank, const std::function<void(NcclCounts&)>& change);
  /// `abort` until leave(backend).
  void enter(const void* backend, std::function<void()> abort);
  void leave(const void* backend);

  /// Stands for a host that blocks, while it lives.
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
  std::string error_;
  std::map<int64_t, std::vector<std::string>> blocked_;  ///< by rank, the last entered last
  std::mutex backends_mutex_;  ///< held while they are aborted, so that none goes meanwhile
  std::map<const void*, std::function<void()>> backends_;
};

}  // namespace lockstep::testing
