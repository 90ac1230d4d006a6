#include "lockstep/planner/transfer_times.h"

#include <algorithm>
#include <set>
#include <unordered_set>

namespace lockstep {

TransferTimes::TransferTimes(const JobProgram& job, const JobGroups& groups, const Machine& machine)
    : job_(job), groups_(groups), machine_(machine), ranks_of_(groups.classes().size()) {
  for (int64_t rank = 0; rank < job.world_size(); ++rank)
    ranks_of_[groups.class_of(rank)].push_back(rank);
  for (uint32_t c = 0; c < groups.classes().size(); ++c)
    known_.emplace_back(program_of(c).calls.size());
}

const RankProgram& TransferTimes::program_of(uint32_t rank_class) const {
  return job_.programs[groups_.classes()[rank_class].program];
}

Machine::Transfer TransferTimes::of(uint32_t rank_class, uint32_t number) {
  std::optional<Machine::Transfer>& known = known_[rank_class][number];
  if (known) return *known;
  known.emplace();
  const auto note = [&](const Machine::Transfer& transfer) {
    known->seconds = std::max(known->seconds, transfer.seconds);
    known->occupancy = std::max(known->occupancy, transfer.occupancy);
  };
  const ProgramCall& call = program_of(rank_class).calls[number];
  if (!call.is_message() && call.operation.kind != CollectiveOperation::Kind::exchange) {
    for (const RankList* ranks : placed_lists(rank_class, call.group))
      note(machine_.transfer(call, *ranks, /*position=*/0));
    return *known;
  }
  ProgramCall of_two = call;
  of_two.operation.position = 1;
  for (const RankList& pair : pairs(rank_class, call))
    note(machine_.transfer(of_two, pair, /*position=*/0));
  return *known;
}

TransferTimes::Lists TransferTimes::instances(uint32_t rank_class, uint32_t group) const {
  Lists all;
  std::unordered_set<const RankList*> seen;
  for (const int64_t rank : ranks_of_[rank_class]) {
    const RankList* const ranks = &groups_.ranks_of(rank, group);
    if (seen.insert(ranks).second) all.push_back(ranks);
  }
  return all;
}

const TransferTimes::Lists& TransferTimes::placed_lists(uint32_t rank_class, uint32_t group) {
  const auto [entry, is_new] = lists_.try_emplace({rank_class, group});
  if (!is_new) return entry->second;
  std::set<HostPlacing> seen;
  for (const RankList* ranks : instances(rank_class, group))
    if (seen.insert(placing(*ranks)).second) entry->second.push_back(ranks);
  return entry->second;
}

const HostPlacing& TransferTimes::placing(const RankList& ranks) {
  const auto [entry, is_new] = placings_.try_emplace(&ranks);
  if (is_new) entry->second = host_placing(ranks, machine_.ranks_per_host);
  return entry->second;
}

const std::vector<RankList>& TransferTimes::pairs(uint32_t rank_class, const ProgramCall& call) {
  const ProgramGroup& recorded = program_of(rank_class).groups[call.group];
  const auto size = static_cast<int64_t>(recorded.ranks.size());
  const int64_t offset = (call.operation.position - recorded.position + size) % size;
  const auto [entry, is_new] = pairs_.try_emplace({rank_class, call.group, offset});
  if (is_new) entry->second = find_pairs(rank_class, call.group, offset);
  return entry->second;
}

std::vector<RankList> TransferTimes::find_pairs(uint32_t rank_class, uint32_t group,
                                                int64_t offset) const {
  std::vector<RankList> found;
  std::set<bool> seen;
  for (const RankList* ranks : instances(rank_class, group))
    for (size_t i = 0; i < ranks->size(); ++i) {
      const int64_t rank = (*ranks)[i];
      if (groups_.class_of(rank) != rank_class || &groups_.ranks_of(rank, group) != ranks) continue;
      const int64_t other = (*ranks)[(i + static_cast<size_t>(offset)) % ranks->size()];
      const bool crosses = rank / machine_.ranks_per_host != other / machine_.ranks_per_host;
      if (seen.insert(crosses).second) found.push_back({rank, other});
      if (seen.size() == 2) return found;
    }
  return found;
}

}  // namespace lockstep
