#include <cstdint>

#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include "lockstep/kernels/cuda_kernels.h"

namespace lockstep::kernels {
namespace {

// On other GPUs, libtorch's own fallback reads the groups on the host in every call.
bool has_grouped_kernel() {
  const int major = at::cuda::getCurrentDeviceProperties()->major;
  return major == 9 || major == 10;
}

bool is_aligned(const at::Tensor& x) {
  return reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0;
}

bool fit(const at::Tensor& x, const at::Tensor& y, int64_t first, int64_t second,
         const at::Tensor& ends) {
  constexpr int64_t kMostGroups = 1023;
  return x.scalar_type() == at::kBFloat16 && y.scalar_type() == at::kBFloat16 && first % 8 == 0 &&
         second % 8 == 0 && is_aligned(x) && is_aligned(y) && ends.size(0) <= kMostGroups &&
         has_grouped_kernel();
}

}  // namespace

at::Tensor grouped_rows_cuda(const at::Tensor& x, const at::Tensor& matrices,
                             const at::Tensor& ends) {
  if (!fit(x, matrices, matrices.size(1), matrices.size(2), ends)) return {};
  return at::_grouped_mm(x, matrices, ends);
}

at::Tensor grouped_matrices_cuda(const at::Tensor& a, const at::Tensor& b, const at::Tensor& ends) {
  if (!fit(a, b, a.size(1), b.size(1), ends)) return {};
  const at::Tensor matrices = at::_grouped_mm(a.t(), b, ends);
  // The matrices of empty groups are not zero on every GPU (pytorch #172439).
  zero_empty_groups_cuda(matrices, ends);
  return matrices;
}

// Without atomics, whose order differs between runs. `unsafe`: the host does not check the ends.
at::Tensor grouped_sums_cuda(const at::Tensor& x, const at::Tensor& none, const at::Tensor& ends) {
  (void)none;
  const at::Tensor starts = at::cat({at::zeros({1}, ends.options()), ends});
  const auto wide = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::segment_reduce(x.to(wide), "sum", /*lengths=*/{}, /*indices=*/{}, starts, /*axis=*/0,
                            /*unsafe=*/true, /*initial=*/0)
      .to(x.scalar_type());
}

}  // namespace lockstep::kernels
