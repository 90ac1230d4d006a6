#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/rotary_operands.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

constexpr unsigned kHeadsPerBlock = 8;

/// A warp for each head.
template <bool kBackward, class T>
__global__ void rotary_kernel(RotaryHeads<T> heads, int64_t num_heads) {
  const int64_t head = int64_t{blockIdx.x} * kHeadsPerBlock + threadIdx.y;
  if (head >= num_heads) return;
  const int64_t slots = heads.slots();
  rotary_slot<kBackward>(ThreadLanes{}, heads, head / slots, head % slots);
}

}  // namespace

void rotary_cuda(const RotaryTensors& t) {
  for_storage("rotary", t.packed.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const RotaryHeads<T> heads = t.pointers<T>();
    const int64_t num_heads = t.num_rows() * t.packed.size(2) * t.packed.size(3);
    const auto blocks = static_cast<unsigned>((num_heads + kHeadsPerBlock - 1) / kHeadsPerBlock);
    const dim3 threads(32, kHeadsPerBlock);
    const auto stream = c10::cuda::getCurrentCUDAStream();
    if (t.backward)
      rotary_kernel<true, T><<<blocks, threads, 0, stream>>>(heads, num_heads);
    else
      rotary_kernel<false, T><<<blocks, threads, 0, stream>>>(heads, num_heads);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace lockstep::kernels
