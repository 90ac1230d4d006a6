#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/zeros.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/fingerprint_body.h"

namespace lockstep::kernels {
namespace {

constexpr int kFingerprintThreads = 256, kWarpLanes = 32;
constexpr int64_t kMostFingerprintBlocks = 2048;

/// The order of an integer sum does not matter, so each block adds its own as it ends.
__global__ void fingerprint_kernel(const unsigned char* memory, int64_t bytes,
                                   unsigned long long* result) {
  const int64_t lanes = int64_t{gridDim.x} * kFingerprintThreads;
  uint64_t sum = fingerprint_lane(memory, bytes,
                                  int64_t{blockIdx.x} * kFingerprintThreads + threadIdx.x, lanes);
  for (int step = kWarpLanes / 2; step > 0; step /= 2) sum += __shfl_down_sync(~0U, sum, step);
  if (threadIdx.x % kWarpLanes == 0) atomicAdd(result, static_cast<unsigned long long>(sum));
}

}  // namespace

at::Tensor fingerprint_cuda(const at::Tensor& bytes) {
  const at::Tensor result = at::zeros({}, bytes.options().dtype(at::kLong));
  const int64_t size = bytes.numel();
  if (size == 0) return result;
  constexpr int64_t kBlockBytes = kFingerprintThreads * int64_t{sizeof(WordQuad)};
  const auto blocks = static_cast<unsigned>(
      std::clamp<int64_t>((size + kBlockBytes - 1) / kBlockBytes, 1, kMostFingerprintBlocks));
  fingerprint_kernel<<<blocks, kFingerprintThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      bytes.const_data_ptr<uint8_t>(), size,
      reinterpret_cast<unsigned long long*>(result.data_ptr<int64_t>()));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  return result;
}

}  // namespace lockstep::kernels
