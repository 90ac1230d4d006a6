#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"

namespace lockstep::kernels {
namespace {

constexpr int kZeroThreads = 256;
constexpr int kBlocksOfGroup = 64;

__global__ void zero_empty_groups(uint4* matrices, int64_t words, const int32_t* ends) {
  const int group = blockIdx.y;
  if (ends[group] != (group > 0 ? ends[group - 1] : 0)) return;
  uint4* const matrix = matrices + group * words;
  const int64_t stride = int64_t{gridDim.x} * kZeroThreads;
  for (int64_t i = int64_t{blockIdx.x} * kZeroThreads + threadIdx.x; i < words; i += stride)
    matrix[i] = make_uint4(0, 0, 0, 0);
}

}  // namespace

void zero_empty_groups_cuda(const at::Tensor& matrices, const at::Tensor& ends) {
  const int64_t words = matrices.stride(0) * matrices.element_size() / 16;
  const dim3 blocks(kBlocksOfGroup, static_cast<unsigned>(ends.size(0)));
  zero_empty_groups<<<blocks, kZeroThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      static_cast<uint4*>(matrices.mutable_data_ptr()), words, ends.const_data_ptr<int32_t>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace lockstep::kernels
