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

/// Creates the c10d backend of a group instead of Gloo or NCCL. For tests and tools.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSpec&)>;

/// The same for tensors on a device with streams; there wait() makes the current stream wait.
using DeviceBackendFactory =
    std::function<c10::intrusive_ptr<c10d::Backend>(const BackendSpec&, c10::Device)>;

/// Options of a ParallelState.
struct ParallelStateOptions {
  /// Sizes of the axes. world_size is taken from the launch environment if there is one.
  ParallelSizes sizes = {};
  /// Where tensors live: the CPU, or one CUDA device (NCCL, and Gloo for host data), which
  /// becomes the current device of the thread that constructs the ParallelState. Other threads that
  /// use the library must make it current themselves, for example with c10::DeviceGuard.
  c10::Device device = c10::kCPU;
  /// Timeout after which an unfinished communication fails; unset: 600 s on a GPU, 60 s on the CPU.
  std::optional<std::chrono::milliseconds> timeout = {};
  /// All ranks run on one host: Gloo then listens on the loopback interface alone. Taken from the
  /// launch environment if there is one.
  bool single_host = true;
  /// Distinguishes this run from others that use the same store. Taken from the launch environment
  /// if there is one.
  std::string run_id = {};
  /// What else must be the same on all ranks, such as fields of a configuration or a fingerprint of
  /// a layout. World size, sizes and code build are always compared. List it in the same order on
  /// all ranks.
  std::vector<AnnouncedField> announcement = {};
  /// Options of the groups of a kind.
  std::map<GroupKind, GroupOptions> group_options = {};
  /// Use separate communicators for ParallelState::all_gather_group().
  bool create_all_gather_groups = false;
  /// Called repeatedly until all ranks have met: returns why they never will, if a launcher knows.
  /// Construction then fails with that message. Unset: not asked.
  std::function<std::optional<std::string>()> meeting_obstacle = {};
  /// For tensors on the CPU. Unset: Gloo.
  BackendFactory backend_factory = {};
  /// For tensors on `device`. Unset: NCCL for CUDA; required for a device of another type.
  DeviceBackendFactory device_backend_factory = {};
  /// Called with every collective. For tests and tools.
  CollectiveObserver observer = {};
};

/// The position of this process (or thread) in the grid of ranks, and its groups. It is a value
/// that you pass to whatever needs it: nothing is global, so one process can hold several ranks.
/// Copies share the groups. The last copy must be destroyed before the process ends.
///
/// The constructor waits for all ranks. They compare their announcements before any group is
/// created. If these differ, every rank throws the same error: ConfigError with the first field
/// that differs. CommunicationError names the ranks that did not come within the timeout, the rank
/// that failed before the meeting and why, or the two processes that claim one rank.
///
/// No call waits much longer than the timeout for ranks that hang, died or lost their network. The
/// error begins with that rank if it is known; this includes the rank that serves the store. A
/// thread checks for failures and signals that this rank is alive, four times a second.
///
/// When the last copy is destroyed, the rank checks out. If rank 0 serves the store, it waits for
/// the others to check out, for at most 5 s, 2 s after a failure, 10 s after a refusal. In the
/// store of torchrun's agent it waits only if their configurations do not fit or one of them failed
/// before the meeting, for at most 3 s, so that later ones learn why. After that no rank can create
/// a group or learn of a failure. Once all ranks have checked out they can meet again, with a new
/// ParallelState on each of them; until then they wait for the remaining ones.
///
/// If SIGPIPE has its default action, the first group of several ranks ignores it, so that the
/// death of a peer is an error and does not end the process.
class ParallelState {
 public:
  /// One process without peers, on `device`.
  static ParallelState single_process(c10::Device device = c10::kCPU);

  /// Rank `rank` of a world that does not exist, on the CPU. Nothing is sent and nothing waits.
  /// Every collective completes at once as if all ranks had sent the same input as this one (a sum
  /// is the size of the group times the input, a gather repeats it), and received messages are
  /// zeros. `observer` sees every call. So one process can find out what any rank of any world
  /// would communicate; see verify_collectives(). ConfigError as for a real rank.
  static ParallelState planning_rank(const ParallelSizes& sizes, int64_t rank,
                                     CollectiveObserver observer = {});

  /// The rank that a launcher's environment describes. Throws ConfigError if the sizes do not fit
  /// the world, CommunicationError if the store cannot be served (port in use) or reached, or
  /// belongs to another run; each names its address.
  ParallelState(const LaunchEnvironment& environment, ParallelStateOptions options = {});

  /// Rank `rank` of options.sizes.world_size ranks that share `store`, such as threads of one
  /// process over a c10d::HashStore (see prepare_rank_threads). `store` may be null for one rank.
  /// The rank keeps it until it checks out; what an aborted NCCL backend keeps is a clone.
  ParallelState(const c10::intrusive_ptr<c10d::Store>& store, int64_t rank,
                ParallelStateOptions options);

  /// This rank in the world, and the number of ranks.
  int64_t rank() const;
  int64_t world_size() const;
  c10::Device device() const;
  /// In the store of torchrun's agent: how many rounds of the job began before this one, the same
  /// on all ranks. A round begins with each restart, and with each new ParallelState of the ranks.
  /// Unset elsewhere, and for a single rank.
  std::optional<int64_t> earlier_rounds() const;
  /// The grid: sizes of the axes and the ranks of every group.
  const RankGrids& grids() const;

  /// This rank's group of a kind. The first call connects it: all its members must make that call,
  /// and calls for groups that share ranks must come in the same order on all of them. Kinds with
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

  /// A group of arbitrary ranks, in the given order; `name` appears in messages. The first call
  /// connects the group, and all its members must make it. Equal lists of ranks share one
  /// communicator, also with group(). UsageError: a rank that is outside the world or listed twice,
  /// or a list without this rank.
  ProcessGroup group_of_ranks(const std::string& name, RankList ranks) const;

  /// Declares which training step begins; errors name the step next to its collectives.
  void begin_step(int64_t step) const;

  /// Where the time of this rank's training steps goes. Between its begin() and end() every wait
  /// for other ranks counts as StepPart::communication.
  const std::shared_ptr<StepClock>& step_clock() const;

  /// Compares what the ranks have done so far in every connected group: operation, label, number of
  /// elements and dtype of each collective. It finds mismatches that a backend does not detect and
  /// that give wrong numbers, such as a rank that skipped one of two collectives of the same size.
  /// Every rank must call it at the same point, with the same groups connected. It costs one
  /// all-gather of 16 bytes per group. CommunicationError, on every rank of the group, says which
  /// rank did something else, and what.
  void check_in_step() const;

  /// If a launcher serves the store of the ranks (as torchrun does) and has ended: "the launcher's
  /// store at HOST:PORT has exited". Connected groups can still be used, but no new group can be
  /// connected. Communicates nothing; costs one system call.
  std::optional<std::string> lost_launcher() const;

  /// Throws CommunicationError, with ranks and causes, once an operation on device tensors has
  /// failed. The rank's communicators have then been aborted, and values that the host reads from
  /// the device are meaningless, so call this after reading one. The library does so wherever it
  /// reads. Communicates nothing. On the CPU the operation itself throws, and this function then
  /// throws without the causes; this tells you whether a c10::Error of libtorch is the consequence
  /// of a failed operation.
  void check_failures() const;

  /// Tells the other ranks that this one fails; see ProcessGroup::post_failure. Connects nothing.
  void post_failure(const std::string& message) const noexcept;

 private:
  struct Impl;
  explicit ParallelState(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}

  std::shared_ptr<Impl> impl_;
};

/// Call it before the first group in a process that holds several ranks as threads. It turns off
/// c10d's flight recorder (TORCH_FR_BUFFER_SIZE=0, unless the variable is set). libtorch 2.11
/// shares the recorder between all groups of a process without a lock, so ranks as threads would
/// crash now and then.
void prepare_rank_threads();

}  // namespace lockstep
