#include "lockstep/parallel_state/rank_groups.h"

#include "lockstep/core/check.h"

namespace lockstep {

RankGroups::RankGroups(const GroupSet& groups) : RankGroups(groups, {{groups.size()}, {true}}) {}

RankGroups::RankGroups(const GroupSet& groups, const GroupSet& parts)
    : outer_(groups), inner_(parts), picked_(parts.size()) {
  require<UsageError>(parts.count() * parts.size() == groups.size(),
                      "RankGroups: {} parts of {} positions, but groups of {} ranks", parts.count(),
                      parts.size(), groups.size());
}

RankGroups RankGroups::picked(int64_t count, int64_t step) const {
  RankGroups result = *this;
  result.picked_ = count;
  result.step_ = step;
  return result;
}

RankGroups RankGroups::merged(int64_t count) const {
  RankGroups result = *this;
  result.merged_ = count;
  return result;
}

void RankGroups::check(int64_t index, int64_t position) const {
  require<UsageError>(index >= 0 && index < count(), "group {} of {}: no such group", index,
                      count());
  require<UsageError>(position >= 0 && position < size(), "position {} in a group of {} ranks",
                      position, size());
}

int64_t RankGroups::rank_at(int64_t index, int64_t position) const {
  check(index, position);
  const int64_t part = index * merged_ + position / picked_, pick = position % picked_;
  return outer_.first(part / inner_.count()) +
         outer_.offset(inner_.first(part % inner_.count()) + inner_.offset(pick * step_));
}

RankList RankGroups::group(int64_t index) const {
  RankList ranks;
  ranks.reserve(static_cast<size_t>(size()));
  visit(index, [&](int64_t rank) { ranks.push_back(rank); });
  return ranks;
}

std::optional<RankGroups::Place> RankGroups::place_of(int64_t rank) const {
  if (count() == 0) return std::nullopt;
  const int64_t around = outer_.position_of(rank), position = inner_.position_of(around);
  if (position % step_ != 0 || position / step_ >= picked_) return std::nullopt;
  return Place{outer_.index_of(rank) * inner_.count() + inner_.index_of(around), position / step_};
}

std::optional<int64_t> RankGroups::index_of(int64_t rank) const {
  const auto place = place_of(rank);
  return place ? std::optional(place->part / merged_) : std::nullopt;
}

std::optional<int64_t> RankGroups::position_of(int64_t rank) const {
  const auto place = place_of(rank);
  return place ? std::optional(place->part % merged_ * picked_ + place->pick) : std::nullopt;
}

}  // namespace lockstep
