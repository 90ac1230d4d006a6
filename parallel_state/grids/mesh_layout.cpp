#include "lockstep/parallel_state/mesh_layout.h"

#include <algorithm>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/axis_groups.h"
#include "lockstep/parallel_state/parallel_axes.h"

namespace lockstep {
namespace {

using Wheel = MeshDimension::Wheel;

std::string describe(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i)
    text += fmt::format("{}{}={}", i == 0 ? "" : " x ", names[i], shape[i]);
  return text;
}

void check_axes(const std::vector<int64_t>& shape, const std::vector<std::string>& names) {
  require<ConfigError>(!names.empty() && shape.size() == names.size(),
                       "mesh: found {} sizes and {} names of axes, allowed: one name for each size",
                       shape.size(), names.size());
  const std::string mesh = describe(shape, names);
  for (size_t i = 0; i < names.size(); ++i) {
    require<ConfigError>(!names[i].empty(), "mesh {}: axis {} has no name", mesh, i);
    require<ConfigError>(std::find(names.begin(), names.begin() + i, names[i]) == names.begin() + i,
                         "mesh {}: axis '{}' is named twice", mesh, names[i]);
    require<ConfigError>(shape[i] >= 1, "mesh {}: axis '{}' has size {}, allowed: >= 1", mesh,
                         names[i], shape[i]);
  }
}

/// Makes row-major axes. Throws ConfigError if their last rank does not fit into 64 bits.
std::vector<MeshDimension> make_axes(const std::vector<int64_t>& shape,
                                     const std::vector<std::string>& names, int64_t rank_offset) {
  check_axes(shape, names);
  std::vector<MeshDimension> axes(names.size());
  int64_t stride = 1, end = 0;
  for (size_t i = names.size(); i-- > 0;) {
    axes[i].name = names[i];
    if (shape[i] > 1) axes[i].wheels = {{shape[i], stride}};
    require<ConfigError>(!__builtin_mul_overflow(stride, shape[i], &stride),
                         "mesh {}: its ranks do not fit into 64 bits", describe(shape, names));
  }
  require<ConfigError>(rank_offset >= 0 && !__builtin_add_overflow(rank_offset, stride, &end),
                       "mesh {}: rank offset {}, allowed: >= 0, with all ranks in 64 bits",
                       describe(shape, names), rank_offset);
  return axes;
}

std::vector<Wheel> wheels_of(const std::vector<MeshDimension>& axes) {
  std::vector<Wheel> wheels;
  for (const MeshDimension& axis : axes)
    wheels.insert(wheels.end(), axis.wheels.begin(), axis.wheels.end());
  return wheels;
}

bool holds(const std::vector<Wheel>& wheels, const Wheel& wheel) {
  return std::find(wheels.begin(), wheels.end(), wheel) != wheels.end();
}

/// The distances from the first place to all places that `wheels` reach; the last wheel turns
/// fastest.
std::vector<int64_t> distances(const std::vector<Wheel>& wheels) {
  std::vector<int64_t> result = {0};
  for (const Wheel& wheel : wheels) {
    std::vector<int64_t> next;
    next.reserve(result.size() * static_cast<size_t>(wheel.size));
    for (const int64_t distance : result)
      for (int64_t i = 0; i < wheel.size; ++i) next.push_back(distance + i * wheel.stride);
    result = std::move(next);
  }
  return result;
}

/// The axes of one grid, slowest first, under their names for parameters of that grid.
MeshLayout grid_layout(const RankGrids& grids, Grid grid) {
  const auto known = grid_axes(grid);
  GridSizes sizes;
  for (const GridAxis& axis : known)
    sizes.*axis.in_order->size = grids.size(group_kind_of(axis.axis));
  const std::string order = RankGenerator(sizes, grids.sizes().order).order();
  std::vector<int64_t> shape;
  std::vector<std::string> names;
  for (size_t end = order.size(); end != std::string::npos;) {
    const size_t dash = end == 0 ? std::string::npos : order.rfind('-', end - 1);
    const size_t start = dash == std::string::npos ? 0 : dash + 1;
    const auto axis = std::find_if(known.begin(), known.end(), [&](const GridAxis& row) {
      return order.compare(start, end - start, row.in_order->name) == 0;
    });
    if (axis != known.end()) {
      shape.push_back(sizes.*axis->in_order->size);
      names.emplace_back(to_string(axis->axis));
    }
    end = dash;
  }
  return {shape, names};
}

}  // namespace

struct MeshLayout::RankTable {
  RankList ranks;
  std::map<int64_t, int64_t> places;
};

int64_t MeshDimension::size() const {
  int64_t product = 1;
  for (const Wheel& wheel : wheels) product *= wheel.size;
  return product;
}

MeshLayout::MeshLayout(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                       int64_t rank_offset)
    : axes_(make_axes(shape, names, rank_offset)), rank_offset_(rank_offset) {}

MeshLayout::MeshLayout(const std::vector<int64_t>& shape, const std::vector<std::string>& names,
                       const RankList& ranks)
    : MeshLayout(shape, names) {
  auto table = std::make_shared<RankTable>();
  require<ConfigError>(static_cast<int64_t>(ranks.size()) == size(),
                       "mesh {}: {} ranks are listed, allowed: {}", to_string(), ranks.size(),
                       size());
  table->ranks = ranks;
  for (const int64_t rank : ranks) {
    require<ConfigError>(rank >= 0, "mesh {}: rank {} is listed, allowed: >= 0", to_string(), rank);
    const auto place = static_cast<int64_t>(table->places.size());
    require<ConfigError>(table->places.emplace(rank, place).second,
                         "mesh {}: rank {} is listed twice", to_string(), rank);
  }
  table_ = std::move(table);
}

std::vector<std::string> MeshLayout::names() const {
  std::vector<std::string> names;
  for (const MeshDimension& axis : axes_) names.push_back(axis.name);
  return names;
}

std::vector<int64_t> MeshLayout::shape() const {
  std::vector<int64_t> shape;
  for (const MeshDimension& axis : axes_) shape.push_back(axis.size());
  return shape;
}

int64_t MeshLayout::size() const {
  int64_t product = 1;
  for (const MeshDimension& axis : axes_) product *= axis.size();
  return product;
}

void MeshLayout::require_axis(bool known, const std::string& axis) const {
  if (!known)
    fail<UsageError>("mesh {}: found axis '{}', allowed: {}", to_string(), axis,
                     fmt::join(names(), ", "));
}

size_t MeshLayout::index_of(const std::string& axis) const {
  const auto found = std::find_if(axes_.begin(), axes_.end(),
                                  [&](const MeshDimension& a) { return a.name == axis; });
  require_axis(found != axes_.end(), axis);
  return static_cast<size_t>(found - axes_.begin());
}

std::optional<int64_t> MeshLayout::place_of(int64_t rank) const {
  if (!table_) return rank - rank_offset_;
  const auto found = table_->places.find(rank);
  return found == table_->places.end() ? std::nullopt : std::optional(found->second);
}

int64_t MeshLayout::rank_of(int64_t place) const {
  return table_ ? table_->ranks[static_cast<size_t>(place)] : rank_offset_ + place;
}

RankList MeshLayout::ranks() const {
  RankList ranks = distances(wheels_of(axes_));
  for (int64_t& rank : ranks) rank = rank_of(first_place_ + rank);
  return ranks;
}

std::optional<std::vector<int64_t>> MeshLayout::coordinate(int64_t rank) const {
  const std::optional<int64_t> place = place_of(rank);
  if (!place || *place < first_place_) return std::nullopt;
  int64_t reached = first_place_;
  std::vector<int64_t> coordinate;
  for (const MeshDimension& axis : axes_) {
    int64_t index = 0;
    for (const Wheel& wheel : axis.wheels) {
      const int64_t turn = *place / wheel.stride % wheel.size;
      index = index * wheel.size + turn;
      reached += turn * wheel.stride;
    }
    coordinate.push_back(index);
  }
  return reached == *place ? std::optional(std::move(coordinate)) : std::nullopt;
}

std::optional<int64_t> MeshLayout::rank_outside(int64_t world) const {
  int64_t highest = 0;
  if (table_) {
    const RankList all = ranks();
    highest = *std::max_element(all.begin(), all.end());
  } else {
    int64_t place = first_place_;
    for (const Wheel& wheel : wheels_of(axes_)) place += (wheel.size - 1) * wheel.stride;
    highest = rank_of(place);
  }
  return highest < world ? std::nullopt : std::optional(highest);
}

MeshLayout MeshLayout::slice(const std::vector<std::string>& axes, int64_t rank,
                             const std::vector<MeshDimension>& joined) const {
  require<UsageError>(!axes.empty(), "mesh {}: a slice needs at least one axis", to_string());
  require<UsageError>(contains(rank), "rank {} is not in the mesh {} of {} ranks", rank,
                      to_string(), size());
  const std::vector<Wheel> all = wheels_of(axes_);
  MeshLayout part = *this;
  part.axes_.clear();
  part.first_place_ = *place_of(rank);
  for (const std::string& name : axes) {
    const auto extra = std::find_if(joined.begin(), joined.end(), [&](const MeshDimension& axis) {
      return axis.name == name && std::all_of(axis.wheels.begin(), axis.wheels.end(),
                                              [&](const Wheel& w) { return holds(all, w); });
    });
    const MeshDimension& axis = extra != joined.end() ? *extra : axes_[index_of(name)];
    const std::vector<Wheel> used = wheels_of(part.axes_);
    for (const MeshDimension& other : part.axes_)
      require<UsageError>(other.name != name, "mesh {}: axis '{}' is named twice", to_string(),
                          name);
    for (const Wheel& wheel : axis.wheels) {
      require<UsageError>(!holds(used, wheel), "mesh {}: axis '{}' shares ranks with {}",
                          to_string(), name, part.to_string());
      part.first_place_ -= *place_of(rank) / wheel.stride % wheel.size * wheel.stride;
    }
    part.axes_.push_back(axis);
  }
  return part;
}

MeshLayout MeshLayout::flatten(const std::string& name) const {
  require<UsageError>(!name.empty(), "mesh {}: a flattened axis needs a name", to_string());
  MeshLayout flat = *this;
  flat.axes_ = {{name, wheels_of(axes_)}};
  return flat;
}

std::vector<std::string> MeshLayout::in_mesh_order(const std::vector<std::string>& axes) const {
  std::vector<std::string> ordered = axes;
  std::sort(ordered.begin(), ordered.end(),
            [&](const std::string& a, const std::string& b) { return index_of(a) < index_of(b); });
  return ordered;
}

RankList MeshLayout::group(const std::vector<std::string>& axes, int64_t rank) const {
  return slice(in_mesh_order(axes), rank).ranks();
}

std::vector<RankList> MeshLayout::groups(const std::vector<std::string>& axes) const {
  const std::vector<Wheel> inside =
      wheels_of(slice(in_mesh_order(axes), rank_of(first_place_)).axes_);
  std::vector<Wheel> outside = wheels_of(axes_);
  std::erase_if(outside, [&](const Wheel& wheel) { return holds(inside, wheel); });
  const std::vector<int64_t> steps = distances(inside);
  std::vector<RankList> groups;
  for (const int64_t start : distances(outside)) {
    RankList& group = groups.emplace_back();
    for (const int64_t step : steps) group.push_back(rank_of(first_place_ + start + step));
  }
  return groups;
}

std::string MeshLayout::to_string() const { return describe(shape(), names()); }

bool MeshLayout::operator==(const MeshLayout& other) const {
  const bool same_ranks =
      table_ == other.table_ || (table_ && other.table_ && table_->ranks == other.table_->ranks);
  return same_ranks && axes_ == other.axes_ && first_place_ == other.first_place_ &&
         rank_offset_ == other.rank_offset_;
}

MeshLayout dense_mesh_layout(const RankGrids& grids) { return grid_layout(grids, Grid::dense); }

MeshLayout expert_mesh_layout(const RankGrids& grids) { return grid_layout(grids, Grid::expert); }

}  // namespace lockstep
