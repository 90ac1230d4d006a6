#include <cuda_bf16.h>

#include <algorithm>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxBlocks = 1024;  // a constant, so that the order of the sum is fixed

__device__ double value(float x) { return x; }
__device__ double value(double x) { return x; }
__device__ double value(__nv_bfloat16 x) { return __bfloat162float(x); }

/// Adds the sums of a block's threads pairwise; thread 0 has the result.
__device__ double add_threads(double sum) {
  __shared__ double shared[kThreads];
  shared[threadIdx.x] = sum;
  __syncthreads();
  for (int step = kThreads / 2; step > 0; step /= 2) {
    if (threadIdx.x < step) shared[threadIdx.x] += shared[threadIdx.x + step];
    __syncthreads();
  }
  return shared[0];
}

template <class T>
__global__ void sum_blocks(const T* x, int64_t n, double* partial) {
  double sum = 0;
  const int64_t stride = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n; i += stride) {
    const double element = value(x[i]);
    sum += element * element;
  }
  sum = add_threads(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__global__ void sum_partials(const double* partial, int count, double* result) {
  double sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) sum += partial[i];
  sum = add_threads(sum);
  if (threadIdx.x == 0) *result = sum;
}

template <class T>
void launch(const T* x, int64_t n, const at::Tensor& partial, const at::Tensor& result) {
  const auto stream = c10::cuda::getCurrentCUDAStream();
  const auto blocks = static_cast<int>(partial.numel());
  sum_blocks<<<blocks, kThreads, 0, stream>>>(x, n, partial.data_ptr<double>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
  sum_partials<<<1, kThreads, 0, stream>>>(partial.const_data_ptr<double>(), blocks,
                                           result.data_ptr<double>());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

at::Tensor sum_of_squares_cuda(const at::Tensor& flat) {
  const int64_t n = flat.numel();
  const int64_t blocks = std::clamp<int64_t>((n + kThreads - 1) / kThreads, 1, kMaxBlocks);
  const auto options = flat.options().dtype(at::kDouble);
  const at::Tensor partial = at::empty({blocks}, options), result = at::empty({}, options);
  if (flat.scalar_type() == at::kFloat)
    launch(flat.const_data_ptr<float>(), n, partial, result);
  else if (flat.scalar_type() == at::kDouble)
    launch(flat.const_data_ptr<double>(), n, partial, result);
  else
    launch(reinterpret_cast<const __nv_bfloat16*>(flat.const_data_ptr<at::BFloat16>()), n, partial,
           result);
  return result;
}

}  // namespace lockstep::kernels
