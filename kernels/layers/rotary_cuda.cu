#include <algorithm>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/rotary_operands.h"
#include "lockstep/kernels/thread_block.cuh"

namespace lockstep::kernels {
namespace {

constexpr unsigned kRotaryThreads = 256, kMostLanes = 32;

/// A block for each token of a sample. Threads along x share a head; those along y loop over heads.
template <bool kBackward, int kPack, class T>
__global__ void rotary_kernel(RotaryHeads<T> heads) {
  const auto slots = static_cast<int32_t>(heads.slots());
  for (int64_t sample = blockIdx.y; sample < heads.batch; sample += gridDim.y)
    for (auto slot = static_cast<int32_t>(threadIdx.y); slot < slots;
         slot += static_cast<int32_t>(blockDim.y))
      rotary_slot<kBackward>(ThreadLanes<kPack>{}, heads, blockIdx.x, sample, slot);
}

template <class T>
bool packs_fit_heads(const RotaryHeads<T>& a) {
  return packs_fit<T>(
      {a.packed, a.query.data, a.key.data, a.value.data, a.cos, a.sin},
      {a.rotated / 2, a.channels, a.query.token, a.query.sample, a.query.head, a.key.token,
       a.key.sample, a.key.head, a.value.token, a.value.sample, a.value.head});
}

template <bool kBackward, class T>
void launch_rotary(const RotaryHeads<T>& heads, int64_t tokens, int64_t slots) {
  with_packs<T>(packs_fit_heads(heads), [&](auto pack) {
    unsigned lanes = 1;
    while (lanes < kMostLanes && lanes * pack < heads.rotated / 2) lanes *= 2;
    const auto samples = static_cast<unsigned>(std::min<int64_t>(heads.batch, 65535));
    const auto rows = static_cast<unsigned>(std::min<int64_t>(slots, kRotaryThreads / lanes));
    rotary_kernel<kBackward, pack>
        <<<dim3(static_cast<unsigned>(tokens), samples), dim3(lanes, rows), 0,
           c10::cuda::getCurrentCUDAStream()>>>(heads);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace

void rotary_cuda(const RotaryTensors& t) {
  for_storage("rotary", t.packed.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const RotaryHeads<T> heads = t.pointers<T>();
    const int64_t tokens = t.packed.size(0), slots = t.packed.size(2) * t.packed.size(3);
    t.backward ? launch_rotary<true>(heads, tokens, slots)
               : launch_rotary<false>(heads, tokens, slots);
  });
}

}  // namespace lockstep::kernels
