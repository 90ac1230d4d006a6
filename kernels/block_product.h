#pragma once

// Internal.

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// Whether block_product() takes these matrices of fp32 on the CPU: a [rows, n], b [n, columns],
/// each contiguous along one of its dimensions. Others are left to oneDNN's operator: those too
/// large for caches, and those that would need kernels for too many shapes. The number of tokens,
/// which is `rows`, or n if `a` is a transposed matrix, must be a multiple of 64.
bool fits_block_product(const at::Tensor& a, const at::Tensor& b);

/// result = a b; or result += a b if `adds`. By oneDNN's kernel for blocks (brgemm), which libtorch
/// exports. oneDNN's operator also looks up a primitive and copies operands, which matters most for
/// small matrices (docs/performance.md). Rows of the result must be contiguous. If `a` is
/// transposed, at most 256 terms are added in registers before they are added to the result. Takes
/// temporary memory for a `b` that is transposed, at most 512 KiB, and 68 KiB of each thread's
/// stack.
void block_product(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, bool adds);

}  // namespace lockstep::kernels
