#pragma once

// Internal.

#include <cstdint>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/parallel_state/order_proof.h"

namespace lockstep {

/// The starts of one program, grouped by what they must match: indices into its calls, in order.
struct GroupedCalls {
  explicit GroupedCalls(const RankProgram& program);

  std::vector<std::vector<uint32_t>> collectives;  ///< of each group
  /// Messages by group, the other end's position, and whether they are sent.
  std::map<std::pair<std::pair<uint32_t, int64_t>, bool>, std::vector<uint32_t>> messages;
};

/// The first difference in a group or between two ranks; nothing if all agree.
std::optional<OrderVerdict> find_mismatch(const JobProgram& job, const JobGroups& groups);

/// "rank 3: all_reduce (sum) of bucket 1, 10 x Float over dp [1, 3]"
std::string describe(const JobProgram& job, const JobGroups& groups, int64_t rank,
                     const ProgramCall& call);

}  // namespace lockstep
