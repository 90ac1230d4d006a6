#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct JobProgram;

/// Whether the ranks of a job come to the end of what they do.
struct OrderVerdict {
  enum class Reason {
    none,      ///< they do
    mismatch,  ///< what meets differs: operation, label, dtype, number of elements, other end
    deadlock,  ///< ranks wait for each other in a circle
  };
  Reason reason = Reason::none;
  std::vector<int64_t> ranks = {};  ///< in the order of `operations`
  std::vector<std::string> operations =
      {};                      ///< "rank 0: all_gather of x, 8 x Float over tp [0, 1]"
  std::string rules = {};      ///< of a deadlock: "NCCL" or "Gloo"
  int64_t classes = 0;         ///< of ranks that stay in step
  int64_t num_operations = 0;  ///< collectives and messages of all ranks

  bool ok() const { return reason == Reason::none; }
  /// The reason and the operations on one line; "" if ok().
  std::string to_string() const;
};

/// Proves that all ranks finish, or finds why not. First, in each group all ranks make the same
/// collectives in one order, and between two ranks what is sent is received in one order. Then by
/// running one rank of each class (see JobGroups) against each other, under the rules of both
/// backends:
///
/// - **Both.** Connecting a group holds up the host until all members do. What a host does comes in
///   its order.
/// - **NCCL**, for tensors on a device. A start hands the operation to a stream and the host goes
///   on; so does a wait, which holds up the device's current stream. An operation starts on a rank
///   once that stream has come to its place and the operations before it on its own stream are
///   done: one stream for the collectives of a communicator, one for the messages of each pair of
///   ranks in both directions. Of several communicators the collectives of a rank also run in the
///   order of their starts, because NCCL does not promise that two of them run side by side. The
///   first collective of a communicator, and the first message of a direction between two ranks
///   that are not connected, hold up the host until the others make theirs. Nothing is buffered.
/// - **Gloo**, and tensors on the CPU. A start goes on, a wait holds up the host until the
///   operation is done. In a group collectives are done in order, from one rank to another messages
///   are. A message is done once both ends have started it.
///
/// UsageError as JobGroups.
OrderVerdict prove_order(const JobProgram& job);

}  // namespace lockstep
