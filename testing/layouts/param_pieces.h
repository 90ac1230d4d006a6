#pragma once

// Internal: what a rank holds of a whole tensor, by its description.

#include <map>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/parameters.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep::testing {

/// The place of `rank` on an axis.
AxisPlace place_of(const RankGrids& grids, MeshAxis axis, int64_t rank);

/// Its length in dimension 0; 0 for a scalar.
int64_t rows_of(const NamedParameter& param);

/// The piece of `whole` that `rank` holds, cut as torch.chunk does. If the parameter has
/// unpadded_rows and `local_rows` rows on the rank, `whole` gets or loses rows of padding first.
/// Unset: a dimension that is described as cut does not exist.
std::optional<at::Tensor> piece_of(const at::Tensor& whole, const ParamDescription& description,
                                   const RankGrids& grids, int64_t rank, int64_t local_rows);

/// Copies into `params` of `rank` their pieces of `wholes`, by name. A parameter without a value of
/// its name in `wholes`, or without one of its shape, stays as it is.
void assign_pieces(const std::vector<NamedParameter>& params,
                   const std::map<std::string, at::Tensor>& wholes, const RankGrids& grids,
                   int64_t rank);

/// Which placements over tp or etp would give the rank the shape that it has: "Shard(1)",
/// "Replicate". Empty: none.
std::vector<std::string> placements_that_fit(const at::Tensor& whole, const NamedParameter& local,
                                             const RankGrids& grids, int64_t rank, MeshAxis axis);

/// Whether each finite element of `part` is among those of `wholes`, whatever their order, to 1e-9
/// of the largest. Zeros are everywhere.
bool is_part(const at::Tensor& part, const std::vector<at::Tensor>& wholes);

/// Whether they have one shape and differ by at most `tolerance`, an absolute one.
bool is_near(const at::Tensor& found, const at::Tensor& expected, double tolerance);

/// The largest absolute element that is not NaN; 0 if there is none.
double largest(const at::Tensor& tensor);

}  // namespace lockstep::testing
