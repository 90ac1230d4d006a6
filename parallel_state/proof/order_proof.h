#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

struct JobProgram;

/// Whether the ranks of a job finish what they do.
struct OrderVerdict {
  enum class Reason {
    none,      ///< they do
    mismatch,  ///< calls that meet differ: operation, label, dtype, number of elements, other end
    deadlock,  ///< ranks wait for each other in a cycle
  };
  Reason reason = Reason::none;
  std::vector<int64_t> ranks = {};  ///< in the order of `operations`
  std::vector<std::string> operations =
      {};                      ///< "rank 0: all_gather of x, 8 x Float over tp [0, 1]"
  std::string rules = {};      ///< under which a deadlock occurs: "NCCL" or "Gloo"
  int64_t classes = 0;         ///< of ranks that stay in step
  int64_t num_operations = 0;  ///< collectives and messages of all ranks

  bool ok() const { return reason == Reason::none; }
  /// The reason and the operations on one line; "" if ok().
  std::string to_string() const;
};

/// Proves that all ranks finish, or finds out why not. First it checks that all ranks of each group
/// make the same collectives in the same order, and that what one rank sends to another is received
/// in the same order. Then it runs one rank of each class (see JobGroups) against the others, under
/// the rules of both backends:
///
/// - **Both.** Connecting a group blocks the host until all members connect. A host does everything
///   in program order.
/// - **NCCL**, for tensors on a device. A start hands the operation to a stream and the host
///   continues; the host also continues after a wait, which blocks the device's current stream. An
///   operation starts on a rank once the current stream has reached it and the operations before it
///   on its own stream are done. There is one stream for the collectives of a communicator, and one
///   for the messages of each pair of ranks in both directions. Collectives of different
///   communicators on a rank also run in the order of their starts, because NCCL does not promise
///   that two of them run concurrently. The first collective of a communicator, and the first
///   message in each direction between two ranks that are not connected, block the host until the
///   others make theirs. Nothing is buffered.
/// - **Gloo**, and tensors on the CPU. A start does not block; a wait blocks the host until the
///   operation is done. Collectives of a group are done in order, and so are messages from one rank
///   to another. A message is done once both ends have started it.
///
/// UsageError as JobGroups.
OrderVerdict prove_order(const JobProgram& job);

}  // namespace lockstep
