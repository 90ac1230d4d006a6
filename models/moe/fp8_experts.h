#pragma once

// Internal: the products of grouped_linear() in 8-bit floats.

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/grouped_mm.h"
#include "lockstep/models/fp8_scaling.h"

namespace lockstep {

/// x [rows, in], weight [experts, out, in] -> [rows, out]. `notes`: the operands count for the
/// scales of later steps, also the weights of experts without rows. Each expert's rows are padded
/// with zeros to a multiple of 16, which CUDA needs in backward.
at::Tensor fp8_grouped_rows(const Fp8Layer& fp8, const at::Tensor& x, const at::Tensor& weight,
                            const kernels::RowGroups& groups, bool notes);

struct GroupedGradients {
  at::Tensor of_input;   ///< [rows, in]
  at::Tensor of_weight;  ///< [experts, out, in]
};
struct WantedGradients {
  bool of_input, of_weight;
};

/// The gradients that are `wanted`, for the gradient `grad` [rows, out] of the output. The weight's
/// is zero for an expert without rows.
GroupedGradients fp8_grouped_gradients(const Fp8Layer& fp8, const at::Tensor& grad,
                                       const at::Tensor& x, const at::Tensor& weight,
                                       const kernels::RowGroups& groups, WantedGradients wanted);

}  // namespace lockstep
