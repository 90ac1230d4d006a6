#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/storage_of.h"
#include "lockstep/kernels/swiglu_body.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

template <int kPack, class T>
__global__ void swiglu_kernel(const T* inner, T* result, int64_t width) {
  const T* const gate = inner + 2 * blockIdx.x * width;
  swiglu_row(ThreadLanes<kPack>{}, gate, gate + width, result + blockIdx.x * width, width);
}

template <int kPack, class T>
__global__ void swiglu_gradient_kernel(const T* grad, const T* inner, T* of_inner, int64_t width) {
  const T* const gate = inner + 2 * blockIdx.x * width;
  T* const of_gate = of_inner + 2 * blockIdx.x * width;
  swiglu_gradient_row(ThreadLanes<kPack>{}, grad + blockIdx.x * width, gate, gate + width, of_gate,
                      of_gate + width, width);
}

/// Calls launch(element, pack, blocks, threads).
template <class F>
void for_rows(const at::Tensor& half, const at::Tensor& a, const at::Tensor& b, F launch) {
  const int64_t width = half.size(-1);
  const auto blocks = static_cast<unsigned>(half.numel() / width);
  for_storage("swiglu", half.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const bool fit =
        packs_fit<T>({half.const_data_ptr(), a.const_data_ptr(), b.const_data_ptr()}, {width});
    with_packs<T>(fit, [&](auto pack) {
      launch(element, pack, blocks, threads_for(width, pack));
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace

void swiglu_cuda(const at::Tensor& inner, const at::Tensor& result) {
  for_rows(result, inner, inner, [&](auto element, auto pack, unsigned blocks, unsigned threads) {
    using T = decltype(element);
    swiglu_kernel<pack><<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        elements<T>(inner), elements<T>(result), result.size(-1));
  });
}

void swiglu_gradient_cuda(const at::Tensor& grad, const at::Tensor& inner,
                          const at::Tensor& of_inner) {
  for_rows(grad, inner, of_inner, [&](auto element, auto pack, unsigned blocks, unsigned threads) {
    using T = decltype(element);
    swiglu_gradient_kernel<pack><<<blocks, threads, 0, c10::cuda::getCurrentCUDAStream()>>>(
        elements<T>(grad), elements<T>(inner), elements<T>(of_inner), grad.size(-1));
  });
}

}  // namespace lockstep::kernels
