#include "lockstep/planner/job_operations.h"

#include <algorithm>

namespace lockstep {

JobOperations::JobOperations(const JobProgram& job, const JobGroups& groups, const Machine& machine)
    : job_(job),
      groups_(groups),
      transfers_(job, groups, machine),
      counts_(groups.classes().size()) {}

uint32_t JobOperations::start(uint32_t rank_class, uint32_t call_number) {
  const RankProgram& program = job_.programs[groups_.classes()[rank_class].program];
  const ProgramCall& call = program.calls[call_number];
  const uint32_t orbit = groups_.classes()[rank_class].orbits[call.group];
  const int64_t own = program.groups[call.group].position, other = call.operation.position;
  const bool message = call.is_message();
  const bool sends = call.operation.kind == CollectiveOperation::Kind::send;
  const int64_t from = !message ? -1 : sends ? own : other;
  const int64_t to = !message ? -1 : sends ? other : own;
  const int64_t peer = message ? other : -1;
  const uint32_t count = counts_[rank_class][{call.group, peer, sends}]++;
  const auto [entry, is_new] =
      numbers_.try_emplace({orbit, from, to, count}, static_cast<uint32_t>(operations_.size()));
  if (is_new) {
    const auto members = static_cast<uint32_t>(groups_.orbits()[orbit].members.size());
    operations_.push_back({.needed = message ? 2 : members});
  }
  Operation& operation = operations_[entry->second];
  // A receive says nothing about the cost; the send of its pair does.
  if (!message || sends) {
    const Machine::Transfer cost = transfers_.of(rank_class, call_number);
    operation.cost.seconds = std::max(operation.cost.seconds, cost.seconds);
    operation.cost.occupancy = std::max(operation.cost.occupancy, cost.occupancy);
  }
  operation.started.emplace_back(rank_class, Stream{call.group, peer});
  return entry->second;
}

}  // namespace lockstep
