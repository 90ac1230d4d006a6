#include "lockstep/parallel_state/device_mesh.h"

#include <algorithm>
#include <mutex>

#include "lockstep/core/check.h"

namespace lockstep {

struct DeviceMesh::Shared {
  Shared(ParallelState with_state, std::vector<std::string> names)
      : state(std::move(with_state)), root_names(std::move(names)) {}

  ParallelState state;
  std::vector<std::string> root_names;
  std::mutex mutex;
  std::vector<MeshDimension> flattened;
};

DeviceMesh::DeviceMesh(ParallelState state, MeshLayout layout)
    : shared_(std::make_shared<Shared>(std::move(state), layout.names())),
      layout_(std::move(layout)) {
  const int64_t world = parallel_state().world_size();
  const std::optional<int64_t> outside = layout_.rank_outside(world);
  require<ConfigError>(!outside, "mesh {}: holds rank {}, which is outside the world of {} ranks",
                       to_string(), outside.value_or(0), world);
}

DeviceMesh::DeviceMesh(std::shared_ptr<Shared> shared, MeshLayout layout)
    : shared_(std::move(shared)), layout_(std::move(layout)) {}

DeviceMesh::DeviceMesh(ParallelState state, const std::vector<int64_t>& shape,
                       const std::vector<std::string>& names, int64_t rank_offset)
    : DeviceMesh(std::move(state), MeshLayout(shape, names, rank_offset)) {}

DeviceMesh::DeviceMesh(ParallelState state, const std::vector<int64_t>& shape,
                       const std::vector<std::string>& names, const RankList& ranks)
    : DeviceMesh(std::move(state), MeshLayout(shape, names, ranks)) {}

DeviceMesh DeviceMesh::dense(const ParallelState& state) {
  return {state, dense_mesh_layout(state.grids())};
}

DeviceMesh DeviceMesh::expert(const ParallelState& state) {
  return {state, expert_mesh_layout(state.grids())};
}

const ParallelState& DeviceMesh::parallel_state() const { return shared_->state; }

std::optional<std::vector<int64_t>> DeviceMesh::get_coordinate() const {
  return layout_.coordinate(parallel_state().rank());
}

std::vector<int64_t> DeviceMesh::require_coordinate() const {
  auto coordinate = get_coordinate();
  require<UsageError>(coordinate.has_value(), "rank {} is not in the mesh {} of {} ranks",
                      parallel_state().rank(), to_string(), size());
  return *std::move(coordinate);
}

int64_t DeviceMesh::get_local_rank(const std::string& axis) const {
  return require_coordinate()[layout_.index_of(axis)];
}

DeviceMesh DeviceMesh::slice(const std::vector<std::string>& axes) const {
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  return {shared_, layout_.slice(axes, parallel_state().rank(), shared_->flattened)};
}

DeviceMesh DeviceMesh::flatten(std::string name) const {
  if (name.empty()) name = fmt::format("{}", fmt::join(mesh_dim_names(), "_"));
  if (mesh_dim_names() == std::vector<std::string>{name}) return *this;
  const auto& taken = shared_->root_names;
  require<UsageError>(std::find(taken.begin(), taken.end(), name) == taken.end(),
                      "mesh {}: cannot be flattened to '{}', which is an axis already", to_string(),
                      name);
  MeshLayout flat = layout_.flatten(name);
  const MeshDimension& axis = flat.axes().front();
  const std::lock_guard<std::mutex> lock(shared_->mutex);
  auto& known = shared_->flattened;
  const auto found = std::find_if(known.begin(), known.end(),
                                  [&](const MeshDimension& other) { return other.name == name; });
  require<UsageError>(found == known.end() || *found == axis,
                      "mesh {}: cannot be flattened to '{}', which joins other axes already",
                      to_string(), name);
  if (found == known.end()) known.push_back(axis);
  return {shared_, std::move(flat)};
}

ProcessGroup DeviceMesh::get_group(const std::vector<std::string>& axes) const {
  (void)require_coordinate();
  const std::vector<std::string> names = axes.empty() ? mesh_dim_names() : axes;
  RankList ranks = layout_.group(names, parallel_state().rank());
  return parallel_state().group_of_ranks(fmt::format("{}", fmt::join(names, "-")),
                                         std::move(ranks));
}

}  // namespace lockstep
