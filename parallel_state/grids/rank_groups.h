#pragma once

#include <optional>

#include "lockstep/parallel_state/rank_generator.h"

/// The groups of one kind in a job, computed on demand.
namespace lockstep {

/// All groups of one kind. It holds a few integers, whatever the size of the world: count(),
/// size(), rank_at(), index_of() and position_of() cost the same for any world; group() and visit()
/// cost the length of one group.
class RankGroups {
 public:
  /// No groups at all.
  RankGroups() = default;

  /// The groups of `groups`.
  explicit RankGroups(const GroupSet& groups);

  /// Parts of the groups of `groups`: group g is the pick parts.group(g mod parts.count()) of the
  /// positions of groups.group(g div parts.count()). parts.count() x parts.size() must be
  /// groups.size().
  RankGroups(const GroupSet& groups, const GroupSet& parts);

  /// The same groups with only the positions 0, step, ... (count - 1) step of each.
  RankGroups picked(int64_t count, int64_t step) const;

  /// Every `count` consecutive groups merged into one, one after the other. `count` must divide
  /// count().
  RankGroups merged(int64_t count) const;

  /// Number of groups.
  int64_t count() const { return outer_.count() * inner_.count() / merged_; }
  /// Ranks in each group; 0 if there are no groups.
  int64_t size() const { return picked_ * merged_; }

  /// The rank at `position` of group `index`. UsageError outside count() and size().
  int64_t rank_at(int64_t index, int64_t position) const;
  /// Group `index`, listed. UsageError outside count().
  RankList group(int64_t index) const;
  /// Calls visit(rank) for each rank of group `index` in its order.
  template <class Visit>
  void visit(int64_t index, Visit&& visit) const {
    check(index, 0);
    for (int64_t part = index * merged_; part < (index + 1) * merged_; ++part) {
      const int64_t first = outer_.first(part / inner_.count());
      const int64_t inner_first = inner_.first(part % inner_.count());
      for (int64_t pick = 0; pick < picked_; ++pick)
        visit(first + outer_.offset(inner_first + inner_.offset(pick * step_)));
    }
  }

  /// Index of the group that holds `rank`; empty if none does. UsageError: a rank outside the
  /// world.
  std::optional<int64_t> index_of(int64_t rank) const;
  /// Position of `rank` in its group; empty if it is in none.
  std::optional<int64_t> position_of(int64_t rank) const;

 private:
  void check(int64_t index, int64_t position) const;
  /// Group and position before groups are merged.
  struct Place {
    int64_t part;
    int64_t pick;
  };
  std::optional<Place> place_of(int64_t rank) const;

  GroupSet outer_ = GroupSet({0}, {false});
  GroupSet inner_ = GroupSet({}, {});
  int64_t picked_ = 0;
  int64_t step_ = 1;
  int64_t merged_ = 1;
};

}  // namespace lockstep
