#pragma once

#include <optional>

#include "lockstep/parallel_state/backends.h"
#include "lockstep/tests/support/device/nccl_communicator.h"
#include "lockstep/tests/support/device/nccl_rules.h"
#include "lockstep/tests/support/device/nccl_work.h"

namespace lockstep::testing {

/// One c10d call, ready for the stream.
struct NcclCall {
  c10d::OpType type;
  std::string kind;  ///< as in NcclCounts
  std::vector<at::Tensor> inputs = {}, outputs = {};
  std::vector<at::Tensor> kept = {};  ///< also kept until wait(), like the inputs and outputs
  std::vector<KernelTask> tasks = {};
  bool async = true;  ///< on the communicator's stream; else on the current one, without a work
  bool blocks_host = false;
  /// Operators around the kernel, on its stream.
  std::function<void()> before = [] {}, after = [] {};
};

/// The communicators of one rank in one group, their streams, and what is launched there. Follows
/// the rules of c10d's ProcessGroupNCCL in libtorch 2.11; see nccl_rules_backend.h.
class NcclLaunches {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  NcclLaunches(const BackendSpec& spec, c10::Device device, std::shared_ptr<NcclRules> rules);
  ~NcclLaunches();
  NcclLaunches(const NcclLaunches&) = delete;
  NcclLaunches& operator=(const NcclLaunches&) = delete;

  WorkPtr collective(NcclCall call);
  /// Sends `tensor` to `peer`, or receives it from there.
  WorkPtr message(const at::Tensor& tensor, int peer, bool sends);
  void begin_batch();
  /// Null for an empty batch.
  WorkPtr end_batch();

  void connect_eagerly();
  void shutdown();
  /// Returns when nothing of this rank is on the device, and no graph with its collectives lives.
  void abort();
  /// Returns at once, and also releases hosts that wait for the members of a new communicator.
  void release();
  void set_timeout(std::chrono::milliseconds timeout) { timeout_ = timeout; }
  uint64_t sequence() const { return collectives_; }

 private:
  /// This rank's membership in a communicator.
  struct Member {
    std::shared_ptr<NcclCommunicator> communicator;
    std::vector<int64_t> ranks;  ///< global ranks of its members
    int rank;                    ///< this rank's index among them
    c10::Stream stream;
  };
  enum class State { running, shut_down, aborted };
  struct Batch {
    std::optional<Member> member;
    std::optional<c10::Stream> stream;
    std::vector<KernelTask> tasks;
    std::vector<at::Tensor> tensors;
    bool async = true;
  };

  void release_kernels();
  Member group_communicator();
  Member pair_communicator(int peer);
  Member communicator(const std::string& key, const std::vector<int64_t>& ranks);
  Member make_communicator(const std::string& key, const std::vector<int64_t>& ranks);
  std::shared_ptr<NcclCommunicator> meet(const std::string& key, int size, bool leads);
  int64_t await_id(const std::string& key);
  void check_running() const;
  [[noreturn]] void fail_aborted() const;

  c10::intrusive_ptr<NcclWork> new_work(const NcclCall& call, const Member& member);
  void add_to_batch(const NcclCall& call, const Member& member, const c10::Stream& stream);
  void launch(const Member& member, const c10::Stream& stream, const std::string& kind,
              std::vector<KernelTask> tasks);
  /// Records the end and tells the watchdog, except in a capture.
  void end_work(NcclWork& work, const c10::Stream& stream);
  void connect(const Member& member, const std::string& kind, const std::vector<KernelTask>& tasks);
  void note_call(const std::string& kind, const std::vector<at::Tensor>& tensors);
  std::string described(const std::string& what) const;

  const BackendSpec spec_;
  const int64_t global_rank_;
  const c10::Device device_;
  const std::shared_ptr<NcclRules> rules_;
  std::chrono::milliseconds timeout_;
  c10::intrusive_ptr<c10d::Store> store_;
  mutable std::mutex mutex_;
  State state_ = State::running;
  std::map<std::string, Member> members_;  ///< by "group", or "0:2" for a pair
  std::map<std::string, Member> joining_;  ///< hosts still wait for the other members
  bool released_ = false;
  bool eager_ = false;
  std::optional<Batch> batch_;
  uint64_t collectives_ = 0, messages_ = 0;
  /// Each launch in a live graph holds a copy.
  const std::shared_ptr<const int> graph_references_ = std::make_shared<int>();
  NcclWatchdog watchdog_;
};

}  // namespace lockstep::testing
