#pragma once

// Internal.

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/parallel_state/rank_grids.h"
#include "lockstep/parallel_state/rank_program.h"

/// The programs of all ranks of a job. Needs no libtorch.
namespace lockstep {

/// The programs of the ranks of a job. Ranks that do the same share one, which was recorded on one
/// of them.
struct JobProgram {
  std::vector<RankProgram> programs;
  std::vector<uint32_t> program_of;  ///< of each rank of the world
  /// Needed if several ranks share a program: their groups are the groups of the same kind that
  /// hold them; for a group without a kind, the same positions within the smallest kind of group
  /// that holds all its ranks.
  std::optional<RankGrids> grids = {};

  int64_t world_size() const { return static_cast<int64_t>(program_of.size()); }
  /// Number of starts of all ranks.
  int64_t num_operations() const;
};

/// All communicators of a job, by the ranks that use them, and the classes of ranks that stay in
/// step with each other.
///
/// **Why one rank of a class represents all.** The classes are an equitable partition: ranks of a
/// class have the same program, and what the program calls its k-th group is, on each of them, a
/// group of the same classes, which know it by the same numbers. (If messages travel in the group,
/// also the same classes at the same positions.) An operation starts on a rank once the operations
/// that it waits for are done there, and ends once it has started on all its members; no event that
/// can happen prevents another that can. So all orders of events end in the same state. One of
/// these orders is that in which all ranks of a class take each step together: by induction over
/// steps, if one rank of a class can take a step, all can. A run of one rank per class, in which an
/// operation ends once it has started on the classes of its group, ends where a run of all ranks
/// ends.
class JobGroups {
 public:
  /// One communicator, as seen by one member.
  struct Member {
    uint32_t rank_class = 0;
    uint32_t group = 0;  ///< in the program of the class
    auto operator<=>(const Member&) const = default;
  };
  /// Communicators with equivalent members.
  struct Orbit {
    RankList ranks;                      ///< of one of them
    std::vector<Member> members;         ///< each once
    std::vector<Member> by_position;     ///< if messages or exchanges travel in it; otherwise empty
    std::vector<uint32_t> rank_classes;  ///< of the members, each once
  };
  struct RankClass {
    uint32_t program = 0;
    int64_t first_rank = 0;
    std::vector<uint32_t> orbits;  ///< of each group of the program
  };
  /// A rank that does not use a communicator that another rank of its group uses.
  struct Absence {
    int64_t absent = 0, member = 0;
    uint32_t group = 0;  ///< in the program of `member`
  };

  /// UsageError: ranks of one program have different positions in a group in which the program
  /// sends messages, or the grids cannot determine their groups.
  explicit JobGroups(const JobProgram& job);

  const std::vector<Orbit>& orbits() const { return orbits_; }
  const std::vector<RankClass>& classes() const { return classes_; }
  uint32_t class_of(int64_t rank) const { return class_of_[static_cast<size_t>(rank)]; }
  /// The ranks of group `group` of the program of `rank`.
  const RankList& ranks_of(int64_t rank, uint32_t group) const;
  const std::optional<Absence>& absence() const { return absence_; }

 private:
  class Finder;
  struct Instance {
    RankList ranks;
    std::vector<int32_t> group_of;  ///< of each member, in its program; -1: it does not use it
  };

  void find_instances(const JobProgram& job);
  void check_positions(const JobProgram& job) const;
  void find_absence();
  /// Splits classes until they are an equitable partition.
  void refine(const JobProgram& job);
  std::vector<uint32_t> orbit_of_instances();
  void number_classes(const JobProgram& job, const std::vector<uint32_t>& orbit_of);

  std::vector<Instance> instances_;
  std::vector<std::vector<uint32_t>> instance_of_;  ///< of each rank and group of its program
  std::vector<bool> ordered_;  ///< of each instance: messages or exchanges travel in it
  std::vector<uint32_t> class_of_;
  std::vector<Orbit> orbits_;
  std::vector<RankClass> classes_;
  std::optional<Absence> absence_;
};

}  // namespace lockstep
