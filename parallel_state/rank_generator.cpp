#include "lockstep/parallel_state/rank_generator.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

std::vector<std::string> split_axes(std::string_view text) {
  std::vector<std::string> axes;
  for (size_t start = 0; start <= text.size();) {
    const size_t end = std::min(text.find('-', start), text.size());
    axes.emplace_back(text.substr(start, end - start));
    start = end + 1;
  }
  return axes;
}

struct AxisSize {
  const char* name;
  int64_t size;
};

std::array<AxisSize, 5> axis_sizes(const GridSizes& sizes) {
  return {
      {{"tp", sizes.tp}, {"cp", sizes.cp}, {"ep", sizes.ep}, {"dp", sizes.dp}, {"pp", sizes.pp}}};
}

}  // namespace

GroupSet::GroupSet(std::vector<int64_t> sizes, std::vector<bool> mask)
    : sizes_(std::move(sizes)), mask_(std::move(mask)) {
  require<UsageError>(sizes_.size() == mask_.size(), "GroupSet: {} sizes, but {} marks",
                      sizes_.size(), mask_.size());
  for (size_t d = 0; d < sizes_.size(); ++d) (mask_[d] ? size_ : count_) *= sizes_[d];
}

RankList GroupSet::group(int64_t index) const {
  require<UsageError>(index >= 0 && index < count_, "GroupSet: group {} of {}", index, count_);
  RankList ranks(static_cast<size_t>(size_));
  for (int64_t position = 0; position < size_; ++position) {
    int64_t rank = 0, stride = 1, outside = index, inside = position;
    for (size_t d = 0; d < sizes_.size(); ++d) {
      int64_t& rest = mask_[d] ? inside : outside;
      rank += rest % sizes_[d] * stride;
      rest /= sizes_[d];
      stride *= sizes_[d];
    }
    ranks[static_cast<size_t>(position)] = rank;
  }
  return ranks;
}

int64_t GroupSet::pick(int64_t rank, bool marked) const {
  require<UsageError>(rank >= 0 && rank < count_ * size_,
                      "rank {} is outside the world of {} ranks", rank, count_ * size_);
  int64_t result = 0, stride = 1;
  for (size_t d = 0; d < sizes_.size(); ++d) {
    if (mask_[d] == marked) {
      result += rank % sizes_[d] * stride;
      stride *= sizes_[d];
    }
    rank /= sizes_[d];
  }
  return result;
}

int64_t GroupSet::index_of(int64_t rank) const { return pick(rank, false); }

int64_t GroupSet::position_of(int64_t rank) const { return pick(rank, true); }

std::vector<RankList> masked_orthogonal_groups(const std::vector<int64_t>& sizes,
                                               const std::vector<bool>& mask) {
  const GroupSet groups(sizes, mask);
  std::vector<RankList> result;
  for (int64_t i = 0; i < groups.count(); ++i) result.push_back(groups.group(i));
  return result;
}

RankGenerator::RankGenerator(const GridSizes& sizes, std::string_view order) {
  const auto known = axis_sizes(sizes);
  require<ConfigError>(sizes.ep == 1 || sizes.cp == 1,
                       "ep ({}) and cp ({}): one grid holds only one of the two above 1", sizes.ep,
                       sizes.cp);
  axes_ = split_axes(order);
  for (auto axis = axes_.begin(); axis != axes_.end(); ++axis) {
    require<ConfigError>(
        std::any_of(known.begin(), known.end(), [&](const auto& k) { return k.name == *axis; }),
        "order '{}': found axis '{}', allowed: tp, cp, ep, dp, pp", order, *axis);
    require<ConfigError>(std::find(axes_.begin(), axis, *axis) == axis,
                         "order '{}': axis '{}' is named twice", order, *axis);
  }
  for (const auto& [name, size] : known) {
    require<ConfigError>(size >= 1, "{}: found size {}, allowed: >= 1", name, size);
    if (std::find(axes_.begin(), axes_.end(), name) != axes_.end()) continue;
    require<ConfigError>(size == 1, "order '{}': lacks axis '{}', whose size is {}", order, name,
                         size);
    axes_.emplace_back(name);
  }
  for (const std::string& axis : axes_) {
    order_ += (order_.empty() ? "" : "-") + axis;
    sizes_.push_back(std::find_if(known.begin(), known.end(), [&](const auto& k) {
                       return k.name == axis;
                     })->size);
  }
}

GroupSet RankGenerator::groups(std::string_view token) const {
  std::vector<bool> mask(axes_.size(), false);
  for (const std::string& axis : split_axes(token)) {
    const auto found = std::find(axes_.begin(), axes_.end(), axis);
    require<UsageError>(found != axes_.end(), "group '{}': '{}' is no axis of '{}'", token, axis,
                        order_);
    mask[static_cast<size_t>(found - axes_.begin())] = true;
  }
  return {sizes_, mask};
}

std::vector<RankList> RankGenerator::get_ranks(std::string_view token) const {
  const GroupSet set = groups(token);
  std::vector<RankList> result;
  result.reserve(static_cast<size_t>(set.count()));
  for (int64_t i = 0; i < set.count(); ++i) result.push_back(set.group(i));
  return result;
}

int64_t RankGenerator::coordinate(std::string_view axis, int64_t rank) const {
  return groups(axis).position_of(rank);
}

}  // namespace lockstep
