#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <c10/util/intrusive_ptr.h>

#include "lockstep/parallel_state/announced_field.h"
#include "lockstep/parallel_state/collective_record.h"
#include "lockstep/parallel_state/group_options.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/process_group.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace lockstep {

struct BackendSpec;
class StepClock;

/// Makes the c10d backend of a group in place of Gloo or NCCL. For tests and tools.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSpec&)>;

/// The same for tensors on a device with streams, whose operations wait() makes a stream wait for.
using DeviceBackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSpec&, c10::Device)>;

/// How a ParallelState is made.
struct ParallelStateOptions {
  /// Sizes of the axes. world_size is taken from the launch environment where there is one.
  ParallelSizes sizes = {};
  /// Where tensors live: the CPU (Gloo), or one CUDA device (NCCL, and Gloo for host data), which
  /// becomes the current one of the thread that constructs ParallelState. Other threads that use
  /// the library make it current themselves, as c10::DeviceGuard does.
  c10::Device device = c10::kCPU;
  /// Time after which a communication that does not end fails.
  std::chrono::milliseconds timeout = std::chrono::seconds(60);
  /// All ranks run on one host: Gloo then listens on the loopback interface alone.
  bool single_host = true;
  /// Tells this run apart from others that use the same store. Taken from the launch environment
  /// where there is one.
  std::string run_id = {};
  /// What must be the same on all ranks beside world size, sizes and code build, which are compared
  /// in any case: fields of a configuration, a fingerprint of a layout. In the same order on all.
  std::vector<AnnouncedField> announcement = {};
  /// Options of the groups of a kind.
  std::map<GroupKind, GroupOptions> group_options = {};
  /// Communicators of their own for ParallelState::all_gather_group().
  bool create_all_gather_groups = false;
  /// Asked now and then until all ranks have met: why they never will, as far as a launcher says
  /// so; construction then fails with it. Unset: nobody says so.
  std::function<std::optional<std::string>()> meeting_obstacle = {};
  /// Of tensors on the CPU. Unset: Gloo.
  BackendFactory backend_factory = {};
  /// Of tensors on `device`. Unset: NCCL for CUDA; a device of another type needs one.
  DeviceBackendFactory device_backend_factory = {};
  /// Is called with every collective. For tests and tools.
  CollectiveObserver observer = {};
};

/// Who talks to whom: this process's (or thread's) place in the grid of ranks, and its groups. A
/// value that is passed to whatever needs it: nothing is global, so one process can hold several
/// ranks. Copies share the groups. The last copy must go before the process ends.
///
/// Construction meets all ranks. They compare what each announces, before any group is made, and
/// every rank throws the same error if they differ: ConfigError with the first field that differs;
/// CommunicationError with the ranks that did not come within the timeout, or with the two
/// processes that claim one rank.
///
/// No call waits longer than about the timeout for ranks that have stopped, died or lost their
/// network, and the error begins with the rank where that can be known, the one that serves the
/// store included. A thread looks for failures and shows that this rank is alive, four times a
/// second.
///
/// When the last copy goes, the rank checks out. Rank 0, where it serves the store, waits for the
/// others to do so, for 5 s at most, 2 s after a failure, 10 s after a refusal; no rank can make a
/// group or learn of a failure after that. Once all ranks have checked out they can meet again,
/// with a new ParallelState on each of them; as long as one has not, the others wait for it.
///
/// Where SIGPIPE has its default action, the first group of several ranks sets it to be ignored, so
/// that the death of a peer is an error and not the end of the process.
class ParallelState {
 public:
  /// One process without peers, on `device`.
  static ParallelState single_process(c10::Device device = c10::kCPU);

  /// Rank `rank` of a world that is not there, on the CPU. Nothing is sent and nobody is waited
  /// for; every collective is answered at once as if all ranks had sent what this one sends (a sum
  /// is the size of the group times the input, a gather repeats it), and a message is received as
  /// zeros. `observer` sees every call. So one process can see what any rank of any world would
  /// communicate; see verify_collectives(). ConfigError as for a real rank.
  static ParallelState planning_rank(const ParallelSizes& sizes, int64_t rank,
                                     CollectiveObserver observer = {});

  /// The rank that a launcher's environment describes. Throws ConfigError if the sizes do not fit
  /// the world, CommunicationError if the store cannot be served (port in use) or reached, or
  /// belongs to another run; each names its address.
  ParallelState(const LaunchEnvironment& environment, ParallelStateOptions options);

  /// Rank `rank` of options.sizes.world_size ranks that share `store`, such as threads of one
  /// process over a c10d::HashStore (see prepare_rank_threads). `store` may be null for one rank.
  ParallelState(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                ParallelStateOptions options);

  /// This rank in the world, and the number of ranks.
  int64_t rank() const;
  int64_t world_size() const;
  c10::Device device() const;
  /// The grid: sizes of the axes and the ranks of every group.
  const RankGrids& grids() const;

  /// This rank's group of a kind, connected at the first call, once; all its members must make that
  /// call, and calls for groups that share ranks come in the same order on all of them. Kinds with
  /// the same ranks share one communicator, unless their options differ. Throws UsageError if this
  /// rank is in no group of the kind.
  ProcessGroup group(GroupKind kind) const;

  /// The ranks of group(kind) over a communicator of their own, so that the all-gather of
  /// parameters and the reduce-scatter of gradients need not wait for each other. Without
  /// create_all_gather_groups the same as group(kind). UsageError for kinds other than dp_cp and
  /// expert_dp.
  ProcessGroup all_gather_group(GroupKind kind) const;

  /// The group of all ranks.
  ProcessGroup world() const;

  /// A group of any ranks, in the order given, under a name of the caller's for messages. Connected
  /// at the first call, which all its members must make; equal lists of ranks share one
  /// communicator, also with group(). UsageError: a rank outside the world or twice, a list without
  /// this rank.
  ProcessGroup group_of_ranks(const std::string& name, RankList ranks) const;

  /// Says which training step begins; errors name it beside the collectives of the step.
  void begin_step(int64_t step) const;

  /// Where the time of this rank's training steps goes. Between its begin() and end() every wait
  /// for other ranks counts as StepPart::communication.
  const std::shared_ptr<StepClock>& step_clock() const;

  /// Compares what the ranks have done so far in every group that is connected: operation, label,
  /// number of elements and dtype of each collective. Finds what a backend lets pass with wrong
  /// numbers, such as a rank that left out one of two collectives of the same size. Every rank must
  /// call it at the same point, with the same groups connected; it costs one all-gather of 16 bytes
  /// a group. CommunicationError, on every rank of the group, says which rank did what instead.
  void check_in_step() const;

  /// Where a launcher serves the store of the ranks (torchrun does) and has ended: "the launcher's
  /// store at HOST:PORT has gone". Groups that are connected can be used on, others cannot be made.
  /// Asks nobody; costs one system call.
  std::optional<std::string> lost_launcher() const;

  /// CommunicationError, with ranks and causes, once an operation on tensors of a device failed.
  /// The rank's communicators are aborted then, and values that the host reads from the device mean
  /// nothing: call it after reading one. The library does so where it reads. Asks nobody. On the
  /// CPU, where the operation itself throws, without the causes: so a c10::Error of libtorch that
  /// follows from one can be told from others.
  void check_failures() const;

  /// Tells the other ranks that this one fails; see ProcessGroup::post_failure. Connects nothing.
  void post_failure(const std::string& message) const noexcept;

 private:
  struct Impl;
  explicit ParallelState(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<Impl> impl_;
};

/// To be called before the first group of a process that holds several ranks as threads: turns
/// c10d's flight recorder off (TORCH_FR_BUFFER_SIZE=0, unless it is set), which libtorch 2.11
/// shares between all groups of a process without a lock, so that ranks as threads crash now and
/// then.
void prepare_rank_threads();

}  // namespace lockstep
