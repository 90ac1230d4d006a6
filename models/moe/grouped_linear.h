#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// One matrix product for each expert: `input` [rows, in], rows[e] of them for expert e, one expert
/// after the other, and `weight` [experts, out, in] -> [rows, out], row by row x W_e^T. No padding:
/// an expert without rows costs nothing, and its weight's gradient is zero. On CUDA in bf16 one
/// launch (at::_grouped_mm) where both widths are multiples of 8, else a product an expert. Only
/// the first derivative exists. UsageError for shapes that do not fit.
at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const std::vector<int64_t>& rows);

}  // namespace lockstep
