#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/storage_of.h"
#include "lockstep/kernels/swiglu_body.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

template <class T>
__global__ void swiglu_kernel(const T* inner, T* result, int64_t width) {
  const T* const gate = inner + 2 * blockIdx.x * width;
  swiglu_row(ThreadLanes{}, gate, gate + width, result + blockIdx.x * width, width);
}

template <class T>
__global__ void swiglu_gradient_kernel(const T* grad, const T* inner, T* of_inner, int64_t width) {
  const T* const gate = inner + 2 * blockIdx.x * width;
  T* const of_gate = of_inner + 2 * blockIdx.x * width;
  swiglu_gradient_row(ThreadLanes{}, grad + blockIdx.x * width, gate, gate + width, of_gate,
                      of_gate + width, width);
}

}  // namespace

void swiglu_cuda(const at::Tensor& inner, const at::Tensor& result) {
  const int64_t width = result.size(-1);
  for_storage("swiglu", inner.scalar_type(), [&](auto element) {
    using T = decltype(element);
    swiglu_kernel<T>
        <<<static_cast<unsigned>(result.numel() / width), threads_for(width), 0,
           c10::cuda::getCurrentCUDAStream()>>>(elements<T>(inner), elements<T>(result), width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void swiglu_gradient_cuda(const at::Tensor& grad, const at::Tensor& inner,
                          const at::Tensor& of_inner) {
  const int64_t width = grad.size(-1);
  for_storage("swiglu", inner.scalar_type(), [&](auto element) {
    using T = decltype(element);
    swiglu_gradient_kernel<T><<<static_cast<unsigned>(grad.numel() / width), threads_for(width), 0,
                                c10::cuda::getCurrentCUDAStream()>>>(
        elements<T>(grad), elements<T>(inner), elements<T>(of_inner), width);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace lockstep::kernels
