#include "lockstep/parallel_state/dtensor.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/redistribute.h"
#include "lockstep/parallel_state/shard_layout.h"

namespace lockstep {
namespace {

std::vector<int64_t> coordinate_in(const DeviceMesh& mesh) {
  auto coordinate = mesh.get_coordinate();
  require<UsageError>(coordinate.has_value(), "DTensor: rank {} is not in the mesh {} of {} ranks",
                      mesh.parallel_state().rank(), mesh.to_string(), mesh.size());
  return *std::move(coordinate);
}

LocalPart part_in(const DeviceMesh& mesh, const std::vector<int64_t>& shape,
                  const std::vector<Placement>& placements, size_t axes) {
  return local_part(shape, mesh.shape(), coordinate_in(mesh), placements, axes);
}

}  // namespace

DTensor::DTensor(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                 std::vector<int64_t> shape)
    : local_(std::move(local)),
      mesh_(std::move(mesh)),
      placements_(std::move(placements)),
      shape_(std::move(shape)) {
  require<UsageError>(local_.defined(), "DTensor: the local tensor of rank {} is undefined",
                      mesh_.parallel_state().rank());
  const bool floating = at::isFloatingType(dtype()) || at::isComplexType(dtype());
  for (const Placement& placement : placements_)
    require<UsageError>(floating || placement != Placement(Partial{ReduceOp::average}),
                        "{}: allowed for floating-point tensors only", to_string());
  const LocalPart part = part_in(mesh_, shape_, placements_, placements_.size());
  require<UsageError>(local_.sizes() == at::IntArrayRef(part.shape),
                      "{}: the local tensor of rank {} has shape [{}], allowed: [{}]", to_string(),
                      mesh_.parallel_state().rank(), fmt::join(local_.sizes(), ", "),
                      fmt::join(part.shape, ", "));
}

DTensor DTensor::from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements) {
  placements = normalize_placements(std::move(placements), local.dim(), mesh.ndim());
  std::vector<int64_t> shape = local.sizes().vec();
  for (size_t axis = 0; axis < placements.size(); ++axis)
    if (const auto* shard = std::get_if<Shard>(&placements[axis]))
      shape[static_cast<size_t>(shard->dim)] *= mesh.shape()[axis];
  return {std::move(local), std::move(mesh), std::move(placements), std::move(shape)};
}

DTensor DTensor::from_local(at::Tensor local, DeviceMesh mesh, std::vector<Placement> placements,
                            std::vector<int64_t> shape) {
  placements =
      normalize_placements(std::move(placements), static_cast<int64_t>(shape.size()), mesh.ndim());
  return {std::move(local), std::move(mesh), std::move(placements), std::move(shape)};
}

DTensor DTensor::redistribute(const std::vector<Placement>& placements) const {
  const at::NoGradGuard no_grad;
  const auto target = normalize_placements(placements, ndim(), mesh_.ndim());
  std::vector<Placement> now = placements_;
  at::Tensor local = local_;
  for (const RedistributeStep& step : plan_redistribution(placements_, target)) {
    const std::string axis = mesh_.mesh_dim_names()[step.axis];
    if (std::holds_alternative<Replicate>(step.from)) {
      const int64_t dim = std::get<Shard>(step.to).dim;
      local = cut_chunk(local, dim, mesh_.size(axis), mesh_.get_local_rank(axis));
    } else {
      const auto* shard = std::get_if<Shard>(&step.from);
      const int64_t length =
          shard ? part_in(mesh_, shape_, now, step.axis).shape[static_cast<size_t>(shard->dim)] : 0;
      const auto label =
          fmt::format("{}, {} to {} over {}", to_string(), lockstep::to_string(step.from),
                      lockstep::to_string(step.to), axis);
      local = change_placement(local, step.from, step.to, length, mesh_.get_group({axis}), label);
    }
    now[step.axis] = step.to;
  }
  return {std::move(local), mesh_, target, shape_};
}

at::Tensor DTensor::full_tensor() const {
  const auto axes = static_cast<size_t>(mesh_.ndim());
  return redistribute(std::vector<Placement>(axes, Replicate{})).to_local();
}

void DTensor::run_check() const {
  const std::string mine = to_string();
  const ProcessGroup group = mesh_.get_group();
  const at::Tensor hashes = at::empty({group.size()}, at::kLong);
  all_gather(group, hashes, at::full({1}, static_cast<int64_t>(text_digest(mine)), at::kLong),
             "DTensor::run_check")
      .wait();
  if (hashes.eq(hashes[0]).all().item<bool>()) return;
  const auto texts = all_gather_texts(group, mine, "DTensor::run_check");
  for (size_t i = 1; i < texts.size(); ++i)
    require<UsageError>(texts[i] == texts[0],
                        "ranks of mesh {} disagree: rank {} has {}, and rank {} has {}",
                        mesh_.to_string(), group.ranks()[0], texts[0], group.ranks()[i], texts[i]);
}

std::vector<int64_t> DTensor::local_offset() const {
  return part_in(mesh_, shape_, placements_, placements_.size()).offset;
}

std::string DTensor::to_string() const {
  return fmt::format("DTensor [{}] {} {} on {}", fmt::join(shape_, ", "), c10::toString(dtype()),
                     lockstep::to_string(placements_), mesh_.to_string());
}

DTensor distribute_tensor(const at::Tensor& full, const DeviceMesh& mesh,
                          std::vector<Placement> placements) {
  const at::NoGradGuard no_grad;
  placements = normalize_placements(std::move(placements), full.dim(), mesh.ndim());
  const std::vector<int64_t> shape = mesh.shape(), coordinate = coordinate_in(mesh);
  at::Tensor local = full;
  for (size_t axis = 0; axis < placements.size(); ++axis) {
    if (shape[axis] == 1) continue;
    if (const auto* shard = std::get_if<Shard>(&placements[axis])) {
      local = cut_chunk(local, shard->dim, shape[axis], coordinate[axis]);
    } else if (placements[axis] == Placement(Partial{})) {
      require<UsageError>(
          at::isFloatingType(full.scalar_type()),
          "distribute_tensor: {} of {} over {} ranks, allowed: floating-point types",
          to_string(placements[axis]), c10::toString(full.scalar_type()), shape[axis]);
      local = local / shape[axis];
    }
  }
  return DTensor::from_local(local, mesh, std::move(placements), full.sizes().vec());
}

}  // namespace lockstep
