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

template <bool kSmoothed, int kPack, class T>
__global__ void cross_entropy_kernel(CrossEntropyRows<T> rows) {
  cross_entropy_rows<kSmoothed>(ThreadBlock<kPack>{}, rows, blockIdx.x, int64_t{blockIdx.x} + 1);
}

template <bool kSmoothed, class W>
__global__ void cross_entropy_losses_kernel(CrossEntropyLosses<W> tokens, int64_t num_tokens) {
  const int64_t first = blockIdx.x * kTokensOfBlock, rest = num_tokens - first;
  cross_entropy_losses<kSmoothed>(ThreadLanes<1>{}, tokens, first,
                                  rest < kTokensOfBlock ? rest : kTokensOfBlock);
}

template <int kPack, class T>
__global__ void cross_entropy_gradient_kernel(CrossEntropyGradientRows<T> rows) {
  cross_entropy_gradient_rows(ThreadLanes<kPack>{}, rows, blockIdx.x, int64_t{blockIdx.x} + 1);
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
    const CrossEntropyRows<T> a = t.rows<T>();
    const auto blocks = static_cast<unsigned>(t.num_tokens());
    const auto stream = c10::cuda::getCurrentCUDAStream();
    with_packs<T>(packs_fit<T>({a.logits}, {a.columns.width}), [&](auto pack) {
      const unsigned threads = threads_for(a.columns.width, pack);
      if (t.smoothed())
        cross_entropy_kernel<true, pack><<<blocks, threads, 0, stream>>>(a);
      else
        cross_entropy_kernel<false, pack><<<blocks, threads, 0, stream>>>(a);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

void cross_entropy_losses_cuda(const CrossEntropyTensors& t) {
  if (t.losses.scalar_type() == at::kDouble) return launch_losses<double>(t);
  launch_losses<float>(t);
}

void cross_entropy_gradient_cuda(const CrossEntropyTensors& t) {
  for_storage("cross entropy", t.logits.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const CrossEntropyGradientRows<T> a = t.gradient_rows<T>();
    with_packs<T>(packs_fit<T>({a.logits, a.result}, {a.columns.width}), [&](auto pack) {
      cross_entropy_gradient_kernel<pack>
          <<<static_cast<unsigned>(t.num_tokens()), threads_for(a.columns.width, pack), 0,
             c10::cuda::getCurrentCUDAStream()>>>(a);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    });
  });
}

}  // namespace lockstep::kernels
