#pragma once

// Internal.

#include <cstdint>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"
#include "lockstep/planner/transfer_times.h"

namespace lockstep {

/// The operations of a job, as the ranks of a simulation start them: which calls of different rank
/// classes are the same operation, how many of them it waits for, and how long it takes.
class JobOperations {
 public:
  /// A stream of a rank, whose operations run one after the other: the group, and for a message the
  /// position of its other end, otherwise -1.
  using Stream = std::pair<uint32_t, int64_t>;

  struct Operation {
    uint32_t needed = 0;  ///< rank classes that start it
    Machine::Transfer cost = {};
    std::vector<std::pair<uint32_t, Stream>> started = {};  ///< by rank class
    bool complete() const { return started.size() == needed; }
  };

  /// All three must outlive it.
  JobOperations(const JobProgram& job, const JobGroups& groups, const Machine& machine);

  /// The rank class starts the operation of call `call` of its program; returns the operation's
  /// number. New operations are numbered consecutively. The cost is that on the slowest of the rank
  /// classes that have started it.
  uint32_t start(uint32_t rank_class, uint32_t call);

  const Operation& operator[](uint32_t number) const { return operations_[number]; }

 private:
  /// (orbit, position from, position to, number)
  using Name = std::tuple<uint32_t, int64_t, int64_t, uint32_t>;

  const JobProgram& job_;
  const JobGroups& groups_;
  TransferTimes transfers_;
  std::vector<Operation> operations_;
  std::map<Name, uint32_t> numbers_;
  /// Calls so far, of each rank class: by group, the message's other end or -1, and direction.
  std::vector<std::map<std::tuple<uint32_t, int64_t, bool>, uint32_t>> counts_;
};

}  // namespace lockstep
