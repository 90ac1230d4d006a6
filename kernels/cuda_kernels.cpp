#include "lockstep/kernels/cuda_kernels.h"

#include "lockstep/kernels/cuda_part.h"

namespace lockstep::kernels {
namespace {

DeviceKernels kernels() {
  return {.adamw = adamw_cuda,
          .sgd = sgd_cuda,
          .sum_of_squares = sum_of_squares_cuda,
          .fingerprint = fingerprint_cuda,
          .grouped_rows = grouped_rows_cuda,
          .grouped_matrices = grouped_matrices_cuda,
          .grouped_sums = grouped_sums_cuda,
          .cross_entropy = cross_entropy_cuda,
          .cross_entropy_losses = cross_entropy_losses_cuda,
          .cross_entropy_gradient = cross_entropy_gradient_cuda,
          .dropout = dropout_cuda,
          .to_fp8 = to_fp8_cuda,
          .scaled_mm = scaled_mm_cuda,
          .norm = norm_cuda,
          .norm_gradient = norm_gradient_cuda,
          .rotary = rotary_cuda,
          .swiglu = swiglu_cuda,
          .swiglu_gradient = swiglu_gradient_cuda};
}

}  // namespace

extern "C" void lockstep_kernels_cuda(CudaPart& part) {
  part = {.kernels = kernels(), .graphs = make_cuda_graph};
}

}  // namespace lockstep::kernels
