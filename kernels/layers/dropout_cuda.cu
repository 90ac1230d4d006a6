#include <algorithm>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/dropout_body.h"
#include "lockstep/kernels/dropout_operands.h"
#include "lockstep/kernels/element_pack.cuh"

namespace lockstep::kernels {
namespace {

constexpr unsigned kDropoutThreads = 256;

/// Elements that a thread takes at a time: whole Philox blocks, and packs of 16 bytes.
template <class T>
constexpr int kBlocksPack = kPackOf<T> < 4 ? 4 : kPackOf<T>;

template <bool kAdds, class T>
LOCKSTEP_LANE void drop_pack(const DropoutRows<T>& a, RowCounter counter, int64_t block,
                             int64_t at) {
  constexpr int kPack = kBlocksPack<T>;
  const ElementPack<T, kPack> x(a.x + at), residual((kAdds ? a.residual : a.x) + at);
  ElementPack<T, kPack> result;
#pragma unroll
  for (int first = 0; first < kPack; first += 4) {
    const PhiloxBlock made =
        philox_block(static_cast<uint32_t>(block + first / 4), counter, a.key[0], a.key[1]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      result.at[first + k] =
          dropped<kAdds>(a, x.at[first + k], residual.at[first + k], made.words[k]);
  }
  result.store(a.result + at);
}

/// Drops the elements of a block that lie in the row.
template <bool kAdds, class T>
LOCKSTEP_LANE void drop_block(const DropoutRows<T>& a, RowCounter counter, int64_t block,
                              int64_t row_start) {
  const PhiloxBlock made = philox_block(static_cast<uint32_t>(block), counter, a.key[0], a.key[1]);
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const int64_t channel = 4 * block + k - a.first_channel, at = row_start + channel;
    if (channel >= 0 && channel < a.width)
      a.result[at] = dropped<kAdds>(a, a.x[at], (kAdds ? a.residual : a.x)[at], made.words[k]);
  }
}

/// Threads along x share a row.
template <bool kAdds, bool kPacks, class T>
__global__ void dropout_kernel(DropoutRows<T> a, int64_t num_rows) {
  const int64_t row = int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
  if (row >= num_rows) return;
  const RowCounter counter = counter_of(a, row);
  const int64_t start = row * a.width, first = a.first_block();
  if constexpr (kPacks) {
    constexpr int kPack = kBlocksPack<T>;
    for (int64_t i = int64_t{threadIdx.x} * kPack; i < a.width; i += int64_t{blockDim.x} * kPack)
      drop_pack<kAdds>(a, counter, first + i / 4, start + i);
  } else {
    for (int64_t i = threadIdx.x; i < a.num_blocks(); i += blockDim.x)
      drop_block<kAdds>(a, counter, first + i, start);
  }
}

template <bool kAdds, bool kPacks, class T>
void launch_dropout(const DropoutRows<T>& a, int64_t num_rows) {
  const int64_t turns = kPacks ? a.width / kBlocksPack<T> : (a.first_channel % 4 + a.width + 3) / 4;
  unsigned lanes = 1;
  while (lanes < kDropoutThreads && lanes < turns) lanes *= 2;
  const unsigned rows = kDropoutThreads / lanes;
  const auto blocks = static_cast<unsigned>((num_rows + rows - 1) / rows);
  dropout_kernel<kAdds, kPacks>
      <<<blocks, dim3(lanes, rows), 0, c10::cuda::getCurrentCUDAStream()>>>(a, num_rows);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

template <bool kAdds, class T>
void launch_with_packs(const DropoutRows<T>& a, int64_t num_rows) {
  const bool fit = a.first_channel % 4 == 0 && a.width % kBlocksPack<T> == 0 &&
                   packs_fit<T>({a.x, a.residual, a.result}, {});
  fit ? launch_dropout<kAdds, true>(a, num_rows) : launch_dropout<kAdds, false>(a, num_rows);
}

}  // namespace

void dropout_cuda(const DropoutTensors& t) {
  for_storage("dropout", t.x.scalar_type(), [&](auto element) {
    const auto rows = t.rows<decltype(element)>();
    rows.residual ? launch_with_packs<true>(rows, t.num_rows())
                  : launch_with_packs<false>(rows, t.num_rows());
  });
}

}  // namespace lockstep::kernels
