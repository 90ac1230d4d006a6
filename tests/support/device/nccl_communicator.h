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
  void* output = nullptr;  ///< may be the input, or overlap it where NCCL works in place
  int64_t count = 0;       ///< elements of the input; of a reduce_scatter, of the output
  at::ScalarType dtype = at::kByte;
  int root = 0;
  NcclReduction reduction = {};
};

/// One end of a message: to `peer` or from it.
struct MessageTask {
  bool sends;
  int peer;
  void* data;
  int64_t bytes;
};

using KernelTask = std::variant<CollectiveTask, MessageTask>;

/// What the members of an NCCL communicator share. Members are threads of one process; each has a
/// host, which joins, connects and aborts, and a stream, on whose worker its kernels run.
///
/// A kernel spins until all its tasks are done or its own member aborts. Nothing else ends it:
/// - The i-th collective of a member meets the i-th of each of the others. Once all have come, the
///   data moves, if all are of one kind, root and number of bytes; else they never end. What else
///   differs (dtype, reduction) is taken as the first member has it.
/// - A message leaves when both ends have come: NCCL's buffers, which let small ones leave earlier,
///   are not to be relied on. Between two members messages match first in first out, whatever their
///   tag. One whose receiver expects another size blocks those behind it.
/// - Members that abort leave the others where they are.
class NcclCommunicator {
 public:
  /// One direction of a pair, and which end of it.
  struct End {
    int from, to;
    bool sends;
    auto operator<=>(const End&) const = default;
  };

  explicit NcclCommunicator(int size);

  /// Makes a communicator that find() returns to the other members. Ids are unique in the process,
  /// so that jobs of one process do not meet.
  static std::shared_ptr<NcclCommunicator> make(int size, int64_t* id);
  static std::shared_ptr<NcclCommunicator> find(int64_t id);

  /// Blocks until all members have joined. Returns false if this one aborts.
  bool join(int member);
  /// The ends of messages in `tasks` that this member has not connected yet.
  std::vector<End> unconnected(int member, const std::vector<KernelTask>& tasks);
  /// Blocks until the other ends have been connected too. Returns false if this member aborts.
  bool connect(int member, const std::vector<End>& ends);
  /// A kernel: blocks the stream's worker. Returns false if this member aborts first; then what was
  /// not done is never done.
  bool run(int member, const std::vector<KernelTask>& tasks);
  /// Releases this member's kernels and host, now and later.
  void abort(int member);

 private:
  struct Posted {
    const KernelTask* task;
    int member;
    bool done = false;
  };
  using Meeting = std::vector<Posted*>;  ///< of each member, null: has not come
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
  std::vector<int64_t> collectives_;                  ///< posted by each member
  std::map<int64_t, Meeting> meetings_;               ///< by the position of the collective
  std::map<std::pair<int, int>, Messages> messages_;  ///< by sender and receiver
};

}  // namespace lockstep::testing
