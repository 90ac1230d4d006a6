#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cross_entropy_body.h"
#include "lockstep/kernels/cross_entropy_operands.h"
#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

constexpr int64_t kTokensOfBlock = 256;

template <bool kSmoothed, class T>
__global__ void cross_entropy_kernel(CrossEntropyRows<T> rows) {
  cross_entropy_rows<kSmoothed>(ThreadBlock{}, rows, blockIdx.x, int64_t{blockIdx.x} + 1);
}

template <bool kSmoothed, class W>
__global__ void cross_entropy_losses_kernel(CrossEntropyLosses<W> tokens, int64_t num_tokens) {
  const int64_t first = blockIdx.x * kTokensOfBlock, rest = num_tokens - first;
  cross_entropy_losses<kSmoothed>(ThreadLanes{}, tokens, first,
                                  rest < kTokensOfBlock ? rest : kTokensOfBlock);
}

template <class T>
__global__ void cross_entropy_gradient_kernel(CrossEntropyGradientRows<T> rows) {
  cross_entropy_gradient_rows(ThreadLanes{}, rows, blockIdx.x, int64_t{blockIdx.x} + 1);
}

template <class W>
void launch_losses(const CrossEntropyTensors& t) {
  const auto blocks = static_cast<unsigned>((t.num_tokens() + kTokensOfBlock - 1) / kTokensOfBlock);
  const auto stream = c10::cuda::getCurrentCUDAStream();
  if (t.share > 0)
    cross_entropy_losses_kernel<true, W>
        <<<blocks, kTokensOfBlock, 0, stream>>>(t.token_losses<W>(), t.num_tokens());
  else
    cross_entropy_losses_kernel<false, W>
        <<<blocks, kTokensOfBlock, 0, stream>>>(t.token_losses<W>(), t.num_tokens());
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyTensors& t) {
  for_storage("cross entropy", t.logits.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const auto rows = static_cast<unsigned>(t.num_tokens());
    const unsigned threads = threads_for(t.columns.width);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    if (t.smoothed())
      cross_entropy_kernel<true, T><<<rows, threads, 0, stream>>>(t.rows<T>());
    else
      cross_entropy_kernel<false, T><<<rows, threads, 0, stream>>>(t.rows<T>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void cross_entropy_losses_cuda(const CrossEntropyTensors& t) {
  if (t.losses.scalar_type() == at::kDouble) return launch_losses<double>(t);
  launch_losses<float>(t);
}

void cross_entropy_gradient_cuda(const CrossEntropyTensors& t) {
  for_storage("cross entropy", t.logits.scalar_type(), [&](auto element) {
    using T = decltype(element);
    cross_entropy_gradient_kernel<T>
        <<<static_cast<unsigned>(t.num_tokens()), threads_for(t.columns.width), 0,
           c10::cuda::getCurrentCUDAStream()>>>(t.gradient_rows<T>());
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace lockstep::kernels
