#pragma once

// Internal.

#include <cstdint>
#include <map>
#include <optional>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "lockstep/parallel_state/job_program.h"
#include "lockstep/planner/machine.h"

namespace lockstep {

/// How long the operations of a job take. Ranks of a class start the same operations, each in
/// groups of its own, and these may lie on hosts otherwise than the groups of the recorded rank. A
/// class takes as long as the slowest of its ranks.
class TransferTimes {
 public:
  /// All three must outlive it.
  TransferTimes(const JobProgram& job, const JobGroups& groups, const Machine& machine);

  /// The most that call `number` of the program of `rank_class` takes on a rank of the class. As
  /// for Machine::transfer().
  Machine::Transfer of(uint32_t rank_class, uint32_t number);

 private:
  using Lists = std::vector<const RankList*>;

  const RankProgram& program_of(uint32_t rank_class) const;
  /// The communicators that are group `group` of a rank of the class, each once.
  Lists instances(uint32_t rank_class, uint32_t group) const;
  /// Those of them that lie on hosts in different ways.
  const Lists& placed_lists(uint32_t rank_class, uint32_t group);
  const HostPlacing& placing(const RankList& ranks);
  /// A rank of the class and its partner in `call`, a message or exchange: a pair inside a host and
  /// one between hosts, if there are such pairs.
  const std::vector<RankList>& pairs(uint32_t rank_class, const ProgramCall& call);
  std::vector<RankList> find_pairs(uint32_t rank_class, uint32_t group, int64_t offset) const;

  const JobProgram& job_;
  const JobGroups& groups_;
  const Machine& machine_;
  std::vector<RankList> ranks_of_;                                    ///< of each class
  std::vector<std::vector<std::optional<Machine::Transfer>>> known_;  ///< of each class and call
  std::map<std::pair<uint32_t, uint32_t>, Lists> lists_;              ///< by class and group
  std::unordered_map<const RankList*, HostPlacing> placings_;
  /// By class, group and distance from the rank to its partner.
  std::map<std::tuple<uint32_t, uint32_t, int64_t>, std::vector<RankList>> pairs_;
};

}  // namespace lockstep
