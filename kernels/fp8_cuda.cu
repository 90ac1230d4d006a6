#include <cuda_fp8.h>

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/element_pack.cuh"
#include "lockstep/kernels/fp8.h"
#include "lockstep/kernels/fp8_tensors.h"
#include "lockstep/kernels/storage_of.h"

namespace lockstep::kernels {
namespace {

constexpr int kPack = static_cast<int>(kFp8Multiple);
constexpr int kTile = 64;  ///< rows and columns that a block transposes
constexpr int kPacks = kTile / kPack;
constexpr int kThreads = kTile * kPacks;  ///< each takes a pack of a row, then one of a column
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffU;

/// The larger of two absolute values; NaN if one is. Their bits, as integers, have the same order.
__device__ unsigned larger(unsigned a, unsigned b) { return a > b ? a : b; }

/// x times `factor`, at most the largest number; NaN if x is not finite.
template <bool kWide>
__device__ uint8_t to_number(float x, float factor) {
  constexpr uint8_t kNan = 0x7f;  // in both formats
  const auto number =
      __nv_cvt_float_to_fp8(x * factor, __NV_SATFINITE, kWide ? __NV_E5M2 : __NV_E4M3);
  return isfinite(x) ? number : kNan;
}

union NumberPack {
  uint4 word;
  uint8_t at[kPack];
};

__device__ void note_largest(unsigned own, unsigned* largest) {
#pragma unroll
  for (int apart = kWarp / 2; apart > 0; apart /= 2)
    own = larger(own, __shfl_xor_sync(kAllLanes, own, apart));
  // The result does not depend on the order of the warps.
  if (threadIdx.x % kWarp == 0) atomicMax(largest, own);
}

/// One scale for all, or one for each row or column.
struct Scales {
  const float* first;
  int row_step, column_step;
};

template <bool kWide, class T>
__global__ void to_fp8_kernel(const T* x, Scales scales, unsigned* largest, uint8_t* values,
                              uint8_t* transposed, int64_t rows, int64_t width) {
  // Each column of the tile begins at a multiple of 16 bytes, in another bank than the one before.
  __shared__ alignas(kPack) uint8_t tile[kTile][kTile + kPack];
  const int64_t first_row = int64_t{blockIdx.x} * kTile, first_column = int64_t{blockIdx.y} * kTile;
  const int line = threadIdx.x / kPacks, begin = threadIdx.x % kPacks * kPack;
  unsigned most = 0;
  if (first_row + line < rows && first_column + begin < width) {
    const int64_t place = (first_row + line) * width + first_column + begin;
    const ElementPack<T, kPack> pack(x + place);
    const float* const scale = scales.first + (first_row + line) * scales.row_step +
                               (first_column + begin) * scales.column_step;
    NumberPack numbers;
#pragma unroll
    for (int k = 0; k < kPack; ++k) {
      const float value = widen(pack.at[k]);
      most = larger(most, __float_as_uint(fabsf(value)));
      numbers.at[k] = to_number<kWide>(value, scale[k * scales.column_step]);
    }
    if (values) *reinterpret_cast<uint4*>(values + place) = numbers.word;
    if (transposed) {
#pragma unroll
      for (int k = 0; k < kPack; ++k) tile[begin + k][line] = numbers.at[k];
    }
  }
  if (largest) note_largest(most, largest);
  if (!transposed) return;
  __syncthreads();
  if (first_column + line < width && first_row + begin < rows)
    *reinterpret_cast<uint4*>(transposed + (first_column + line) * rows + first_row + begin) =
        *reinterpret_cast<const uint4*>(&tile[line][begin]);
}

uint8_t* bytes_of(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<uint8_t*>(tensor.mutable_data_ptr()) : nullptr;
}

}  // namespace

void to_fp8_cuda(const Fp8Tensors& t) {
  const int64_t rows = t.x.size(0), width = t.x.size(1);
  const auto tiles = [](int64_t length) {
    return static_cast<unsigned>((length + kTile - 1) / kTile);
  };
  const bool one = t.scale.numel() == 1;
  const Scales scales = {.first = t.scale.const_data_ptr<float>(),
                         .row_step = !one && t.values.defined() ? 1 : 0,
                         .column_step = !one && !t.values.defined() ? 1 : 0};
  const at::Tensor& any = t.values.defined() ? t.values : t.transposed;
  const bool wide = any.scalar_type() == at::kFloat8_e5m2;
  for_storage("to_fp8", t.x.scalar_type(), [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) <= sizeof(float)) {
      const auto launch = [&](auto kernel) {
        kernel<<<dim3(tiles(rows), tiles(width)), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
            elements<T>(t.x), scales, reinterpret_cast<unsigned*>(bytes_of(t.largest)),
            bytes_of(t.values), bytes_of(t.transposed), rows, width);
      };
      wide ? launch(to_fp8_kernel<true, T>) : launch(to_fp8_kernel<false, T>);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    }
  });
}

}  // namespace lockstep::kernels
