#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/kernels/grouped_mm.h"
#include "lockstep/models/fp8_scaling.h"

namespace lockstep {

using RowGroupsPtr = c10::intrusive_ptr<kernels::RowGroups>;

/// One matrix product for each expert: `input` [rows, in], where `groups` says which rows each
/// expert has, and `weight` [experts, out, in] -> [rows, out], row by row x W_e^T. No padding: an
/// expert without rows costs nothing, and its weight's gradient is zero. Rows of no expert are not
/// read, here and in backward. Forward and backward call an operator with the weight whatever the
/// rows, because that gathers a weight that is sharded over data-parallel ranks, and all of them
/// must gather. For where nobody waits for the device, see grouped_mm.h; elsewhere the host waits
/// once for all calls with the same `groups`. Only the first derivative exists. UsageError for
/// shapes that do not fit.
///
/// With `fp8` (Fp8Scaling::add_experts()) the products are those of 8-bit floats, one call for each
/// expert that has rows on every device, so the host waits for the groups.
at::Tensor grouped_linear(const at::Tensor& input, const at::Tensor& weight,
                          const RowGroupsPtr& groups,
                          const std::shared_ptr<const Fp8Layer>& fp8 = {});

/// x [rows, out] with the row of its expert's `bias` [experts, out] added to each row.
at::Tensor add_expert_bias(const at::Tensor& x, const at::Tensor& bias, const RowGroupsPtr& groups);

}  // namespace lockstep
