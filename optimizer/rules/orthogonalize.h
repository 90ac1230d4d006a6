#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"

/// The arithmetic of Muon (Jordan et al., "Muon: an optimizer for hidden layers in neural
/// networks", 2024).
namespace lockstep {

/// A matrix with the singular vectors of `matrix` [rows, columns] and singular values near 1:
/// `iterations` of Newton-Schulz, X <- a X + (b X X^T + c (X X^T)^2) X, from the matrix divided by
/// its Frobenius norm. (a, b, c) are the five triples that Megatron Core calls quintic, one after
/// the other. In the dtype of `matrix`. The rows or the columns may come in any order: the result
/// has them in the same order.
at::Tensor orthogonalize(const at::Tensor& matrix, int64_t iterations);

/// The direction of a step for the momentum `matrix` [rows, columns]: orthogonalized, times
/// muon_scale() and optimizer.muon_extra_scale_factor. `rows_of_matrices` is that of its
/// ParamDescription; with optimizer.muon_split_qkv each of these matrices is taken by itself, scale
/// included. UsageError if the rows are not whole blocks of them.
at::Tensor muon_direction(const at::Tensor& matrix, const OptimizerConfig& config,
                          const std::vector<int64_t>& rows_of_matrices = {});

/// The factor of an update of a [rows, columns] matrix; see optimizer.muon_scale_mode.
double muon_scale(int64_t rows, int64_t columns, MuonScaleMode mode);

}  // namespace lockstep
