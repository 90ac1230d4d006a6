#include "lockstep/testing/param_pieces.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/parallel_state/axis_groups.h"

namespace lockstep::testing {
namespace {

int64_t dim_of(const Shard& shard, const at::Tensor& tensor) {
  return shard.dim < 0 ? shard.dim + tensor.dim() : shard.dim;
}

at::Tensor chunk_of(const at::Tensor& tensor, int64_t dim, const AxisPlace& place) {
  const int64_t size = tensor.size(dim);
  const int64_t length = (size + place.size - 1) / place.size;
  const int64_t first = std::min(size, length * place.index);
  return tensor.narrow(dim, first, std::min(length, size - first));
}

/// `whole` with `rows` rows, cut or padded with zeros.
at::Tensor with_rows(const at::Tensor& whole, int64_t rows) {
  if (rows <= whole.size(0)) return whole.narrow(0, 0, rows);
  std::vector<int64_t> shape = whole.sizes().vec();
  shape[0] = rows - whole.size(0);
  return at::cat({whole, at::zeros(shape, whole.options())}, 0);
}

std::vector<double> sorted_values(const std::vector<at::Tensor>& tensors) {
  std::vector<double> values;
  for (const at::Tensor& tensor : tensors) {
    const at::Tensor flat = tensor.to(at::kDouble).contiguous().flatten();
    const auto* const data = flat.const_data_ptr<double>();
    std::copy_if(data, data + flat.numel(), std::back_inserter(values),
                 [](double value) { return std::isfinite(value); });
  }
  std::sort(values.begin(), values.end());
  return values;
}

}  // namespace

int64_t rows_of(const NamedParameter& param) {
  return param.tensor.dim() > 0 ? param.tensor.size(0) : 0;
}

AxisPlace place_of(const RankGrids& grids, MeshAxis axis, int64_t rank) {
  const RankGroups groups = grids.groups(group_kind_of(axis));
  return {groups.position_of(rank).value_or(0), groups.size()};
}

std::optional<at::Tensor> piece_of(const at::Tensor& whole, const ParamDescription& description,
                                   const RankGrids& grids, int64_t rank, int64_t local_rows) {
  at::Tensor piece = whole;
  if (description.unpadded_rows && whole.dim() > 0) {
    int64_t rows = local_rows;
    for (const auto& [axis, placement] : description.placements)
      if (const auto* const shard = std::get_if<Shard>(&placement);
          shard && dim_of(*shard, whole) == 0)
        rows *= place_of(grids, axis, rank).size;
    piece = with_rows(whole, rows);
  }
  for (const auto& [axis, placement] : description.placements) {
    const auto* const shard = std::get_if<Shard>(&placement);
    if (!shard) continue;
    const int64_t dim = dim_of(*shard, piece);
    if (dim < 0 || dim >= piece.dim()) return {};
    piece = chunk_of(piece, dim, place_of(grids, axis, rank));
  }
  return piece;
}

void assign_pieces(const std::vector<NamedParameter>& params,
                   const std::map<std::string, at::Tensor>& wholes, const RankGrids& grids,
                   int64_t rank) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& param : params) {
    const auto whole = wholes.find(param.name);
    if (whole == wholes.end()) continue;
    const auto piece = piece_of(whole->second, param.description, grids, rank, rows_of(param));
    if (piece && piece->sizes() == param.tensor.sizes()) at::Tensor(param.tensor).copy_(*piece);
  }
}

std::vector<std::string> placements_that_fit(const at::Tensor& whole, const NamedParameter& local,
                                             const RankGrids& grids, int64_t rank, MeshAxis axis) {
  std::vector<std::string> fitting;
  for (int64_t dim = -1; dim < whole.dim(); ++dim) {
    ParamDescription description = local.description;
    description.placements[axis] = dim < 0 ? Placement(Replicate{}) : Placement(Shard{dim});
    const auto piece = piece_of(whole, description, grids, rank, rows_of(local));
    if (piece && piece->sizes() == local.tensor.sizes())
      fitting.push_back(lockstep::to_string(description.placements[axis]));
  }
  return fitting;
}

bool is_part(const at::Tensor& part, const std::vector<at::Tensor>& wholes) {
  const std::vector<double> all = sorted_values(wholes), some = sorted_values({part});
  double most = 0;
  for (const std::vector<double>* values : {&all, &some})
    if (!values->empty())
      most = std::max({most, std::abs(values->front()), std::abs(values->back())});
  const double tolerance = 1e-9 * most;
  return std::all_of(some.begin(), some.end(), [&](double value) {
    if (std::abs(value) <= tolerance) return true;
    const auto found = std::lower_bound(all.begin(), all.end(), value - tolerance);
    return found != all.end() && *found <= value + tolerance;
  });
}

bool is_near(const at::Tensor& found, const at::Tensor& expected, double tolerance) {
  if (found.sizes() != expected.sizes()) return false;
  return found.numel() == 0 || largest(found - expected) <= tolerance;
}

double largest(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  return at::nan_to_num(tensor.abs(), 0.0, INFINITY, INFINITY).max().item<double>();
}

}  // namespace lockstep::testing
