#include "lockstep/parallel_state/rank_generator.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/parallel_axes.h"

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

std::string known_axes() {
  std::string names;
  for (const OrderAxis& axis : order_axes())
    names += (names.empty() ? "" : ", ") + std::string(axis.name);
  return names;
}

}  // namespace

GroupSet::GroupSet(const std::vector<int64_t>& sizes, const std::vector<bool>& mask) {
  require<UsageError>(sizes.size() == mask.size(), "GroupSet: {} sizes, but {} marks", sizes.size(),
                      mask.size());
  int64_t stride = 1;
  for (size_t d = 0; d < sizes.size(); ++d) {
    std::vector<Dimension>& dimensions = mask[d] ? marked_ : unmarked_;
    (mask[d] ? size_ : count_) *= sizes[d];
    if (sizes[d] == 1) continue;
    if (!dimensions.empty() && dimensions.back().size * dimensions.back().stride == stride)
      dimensions.back().size *= sizes[d];
    else
      dimensions.push_back({sizes[d], stride});
    stride *= sizes[d];
  }
}

int64_t GroupSet::place(const std::vector<Dimension>& dimensions, int64_t position) {
  int64_t rank = 0;
  for (size_t d = 0; d < dimensions.size(); ++d) {
    const auto& [size, stride] = dimensions[d];
    if (d + 1 == dimensions.size()) return rank + position * stride;
    rank += position % size * stride;
    position /= size;
  }
  return rank;
}

int64_t GroupSet::position(const std::vector<Dimension>& dimensions, int64_t rank) const {
  require<UsageError>(rank >= 0 && rank < count_ * size_,
                      "rank {} is outside the world of {} ranks", rank, count_ * size_);
  int64_t result = 0, weight = 1;
  for (const auto& [size, stride] : dimensions) {
    result += rank / stride % size * weight;
    weight *= size;
  }
  return result;
}

RankList GroupSet::group(int64_t index) const {
  require<UsageError>(index >= 0 && index < count_, "GroupSet: group {} of {}", index, count_);
  RankList ranks(static_cast<size_t>(size_));
  for (int64_t position = 0; position < size_; ++position)
    ranks[static_cast<size_t>(position)] = first(index) + offset(position);
  return ranks;
}

RankGenerator::RankGenerator(const GridSizes& sizes, std::string_view order) {
  const auto known = order_axes();
  const auto find = [&](std::string_view name) {
    return std::find_if(known.begin(), known.end(), [&](const auto& k) { return k.name == name; });
  };
  require<ConfigError>(sizes.ep == 1 || sizes.cp == 1,
                       "ep ({}) and cp ({}): one grid holds only one of the two above 1", sizes.ep,
                       sizes.cp);
  axes_ = split_axes(order);
  for (auto axis = axes_.begin(); axis != axes_.end(); ++axis) {
    if (find(*axis) == known.end())
      fail<ConfigError>("order '{}': found axis '{}', allowed: {}", order, *axis, known_axes());
    require<ConfigError>(std::find(axes_.begin(), axis, *axis) == axis,
                         "order '{}': axis '{}' is named twice", order, *axis);
  }
  for (const auto& [name, member] : known) {
    const int64_t size = sizes.*member;
    require<ConfigError>(size >= 1, "{}: found size {}, allowed: >= 1", name, size);
    if (std::find(axes_.begin(), axes_.end(), name) != axes_.end()) continue;
    require<ConfigError>(size == 1, "order '{}': lacks axis '{}', whose size is {}", order, name,
                         size);
    axes_.emplace_back(name);
  }
  for (const std::string& axis : axes_) {
    order_ += (order_.empty() ? "" : "-") + axis;
    sizes_.push_back(sizes.*find(axis)->size);
  }
}

GroupSet RankGenerator::groups(std::string_view token) const {
  std::vector<bool> mask(axes_.size(), false);
  for (const std::string& axis : split_axes(token)) {
    const auto found = std::find(axes_.begin(), axes_.end(), axis);
    require<UsageError>(found != axes_.end(),
                        "group '{}': '{}' is not an axis of "
                        "'{}'",
                        token, axis, order_);
    mask[static_cast<size_t>(found - axes_.begin())] = true;
  }
  return {sizes_, mask};
}

}  // namespace lockstep
