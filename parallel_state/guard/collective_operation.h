#pragma once

// Internal.

#include <cstdint>
#include <optional>
#include <string>

#include "lockstep/core/placement.h"

namespace lockstep {

/// Which operation a rank called, as data. Every call creates and keeps one; it becomes text only
/// when it is read.
struct CollectiveOperation {
  enum class Kind : uint8_t {
    all_reduce,
    reduce_scatter,
    all_gather,
    all_to_all,
    broadcast,
    send,
    receive,
    exchange,    ///< a message to one rank and one from another
    comparison,  ///< of what the ranks have done
    // Autograd functions, named in their errors. They call the operations above.
    scatter_to_group,
    gather_from_group,
    reduce_scatter_to_group,
    all_to_all_rows,
    all_to_all_dims,
  };

  Kind kind = Kind::all_reduce;
  std::optional<ReduceOp> reduction = {};  ///< of operations that reduce
  int64_t position = 0;  ///< in the group: of a broadcast's source, or of a message's other end
  int64_t source = 0;    ///< in the group: of an exchange, whose destination is `position`
  int64_t numerator = 1, denominator = 1;  ///< of the factor that scales the reduced terms

  bool operator==(const CollectiveOperation&) const = default;
};

/// "all_reduce (sum)", "broadcast (from 0)", "send (to 3)", "all_gather": without the factor.
std::string to_string(const CollectiveOperation& operation);

}  // namespace lockstep
