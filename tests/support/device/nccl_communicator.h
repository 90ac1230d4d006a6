#pragma once

#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <variant>
#include <vector>

#include "lockstep/tests/support/device/nccl_reduction.h"

namespace lockstep::testing {

/// A collective as the kernel of one rank sees it: addresses, no tensors.
struct CollectiveTask {
  enum class Kind { all_reduce, reduce, broadcast, all_gather, reduce_scatter };
  Kind kind;
  const void* input = nullptr;
  void* output = nullptr;  ///< may be the input, or overlap it where NCCL allows in-place
  int64_t count = 0;       ///< elements of the input; for reduce_scatter, of the output
  at::ScalarType dtype = at::kByte;
  int root = 0;
  NcclReduction reduction = {};
};

/// One end of a message to or from `peer`.
struct MessageTask {
  bool sends;
  int peer;
  void* data;
  int64_t bytes;
};

using KernelTask = std::variant<CollectiveTask, MessageTask>;

/// The state that the members of an NCCL communicator share. Members are threads of one process.
/// Each has a host, which joins, connects and aborts, and a stream, whose worker runs its kernels.
///
/// A kernel spins until all its tasks are done or its own member aborts. Nothing else ends it:
/// - The i-th collective of a member meets the i-th collective of every other member. Once all have
///   arrived, the data moves if they agree in kind, root and number of bytes; otherwise they never
///   end. Other differences (dtype, reduction) are ignored: the first member's value is used.
/// - A message is transferred when both ends have arrived. NCCL's buffers, which let small messages
///   leave earlier, are not to be relied on. Messages between two members match in FIFO order,
///   whatever their tag. If the receiver expects another size, the message blocks those behind it.
/// - Members that abort do not release the others.
class NcclCommunicator {
 public:
  /// One direction of a pair of members, and one end of it.
  struct End {
    int from, to;
    bool sends;
    auto operator<=>(const End&) const = default;
  };

  explicit NcclCommunicator(int size);

  /// Creates a communicator that find() returns to the other members. Ids are unique in the
  /// process, so jobs in one process do not mix.
  static std::shared_ptr<NcclCommunicator> make(int size, int64_t* id);
  static std::shared_ptr<NcclCommunicator> find(int64_t id);

  /// Blocks until all members have joined. Returns false if this one aborts.
  bool join(int member);
  /// The message ends in `tasks` that this member has not connected yet.
  std::vector<End> unconnected(int member, const std::vector<KernelTask>& tasks);
  /// Blocks until the opposite ends are connected too. Returns false if this member aborts.
  bool connect(int member, const std::vector<End>& ends);
  /// A kernel: blocks the stream's worker. Returns false if this member aborts first; unfinished
  /// tasks then never run.
  bool run(int member, const std::vector<KernelTask>& tasks);
  /// Releases this member's current and future kernels, and its host.
  void abort(int member);

 private:
  struct Posted {
    const KernelTask* task;
    int member;
    bool done = false;
  };
  using Meeting = std::vector<Posted*>;  ///< one for each member; null: has not arrived
  struct Messages {
    std::deque<Posted*> sends, receives;
  };

  void post(Posted& posted);
  void post_collective(Posted& posted);
  void post_message(Posted& posted, const MessageTask& task);
  void withdraw(const std::vector<Posted>& kernel);

  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::set<int> joined_;
  std::set<End> connected_;
  std::vector<bool> aborted_;
  std::vector<int64_t> collectives_;                  ///< number posted by each member
  std::map<int64_t, Meeting> meetings_;               ///< by the position of the collective
  std::map<std::pair<int, int>, Messages> messages_;  ///< by sender and receiver
};

}  // namespace lockstep::testing
