#pragma once

// Internal: the common parts of the CUDA kernels of flat updates.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/core/upload.h"
#include "lockstep/kernels/step_control.h"
#include "lockstep/kernels/update_segment.h"

namespace lockstep::kernels {

constexpr int kUpdateThreads = 256;
constexpr int kElementsPerThread = 8;
constexpr int64_t kElementsPerBlock = int64_t{kUpdateThreads} * kElementsPerThread;

/// A flat tensor in any storage; data is null for an undefined one. The branch on its dtype is the
/// same for all threads.
struct DeviceValues {
  void* data = nullptr;
  at::ScalarType dtype = at::kFloat;

  DeviceValues() = default;
  explicit DeviceValues(const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    data = tensor.data_ptr();
    dtype = tensor.scalar_type();
  }

  template <class T>
  __device__ T load(int64_t i) const {
    switch (dtype) {
      case at::kDouble:
        return static_cast<T>(static_cast<const double*>(data)[i]);
      case at::kBFloat16:
        return static_cast<T>(__bfloat162float(static_cast<const __nv_bfloat16*>(data)[i]));
      case at::kHalf:
        return static_cast<T>(__half2float(static_cast<const __half*>(data)[i]));
      default:
        return static_cast<T>(static_cast<const float*>(data)[i]);
    }
  }

  template <class T>
  __device__ void store(int64_t i, T value) const {
    if (!data) return;
    switch (dtype) {
      case at::kDouble:
        static_cast<double*>(data)[i] = value;
        return;
      case at::kBFloat16:
        static_cast<__nv_bfloat16*>(data)[i] = __float2bfloat16_rn(static_cast<float>(value));
        return;
      case at::kHalf:
        static_cast<__half*>(data)[i] = __float2half_rn(static_cast<float>(value));
        return;
      default:
        static_cast<float*>(data)[i] = static_cast<float>(value);
    }
  }
};

/// A segment as the device reads it. The blocks from `first_block` up to the first block of the
/// next segment update it.
struct DeviceSegment {
  int64_t start, end, first_block;
};

inline int64_t blocks_of(const UpdateSegment& segment) {
  return (segment.end - segment.start + kElementsPerBlock - 1) / kElementsPerBlock;
}

/// Uploads a row for each segment, laid out as a DeviceSegment.
inline at::Tensor upload_segments(const std::vector<UpdateSegment>& segments, at::Device device) {
  at::Tensor host = at::empty({static_cast<int64_t>(segments.size()), 3}, at::kLong);
  auto* row = host.mutable_data_ptr<int64_t>();
  int64_t first_block = 0;
  for (const UpdateSegment& segment : segments) {
    *row++ = segment.start;
    *row++ = segment.end;
    *row++ = first_block;
    first_block += blocks_of(segment);
  }
  return upload(host, device);
}

/// The segments on the device, with blocks of kElementsPerBlock elements.
struct DeviceSegments {
  DeviceSegments(const UpdateSegments& segments, at::Device device)
      : table(segments.table_on(device, upload_segments)) {
    int64_t all = 0;
    for (const UpdateSegment& segment : segments) all += blocks_of(segment);
    blocks = static_cast<unsigned>(all);
  }
  const DeviceSegment* data() const {
    return reinterpret_cast<const DeviceSegment*>(table.const_data_ptr<int64_t>());
  }
  int64_t size() const { return table.size(0); }

  at::Tensor table;
  unsigned blocks;
};

/// Calls `update(i)` for the elements of this thread that lie in a segment.
template <class Update>
__device__ void for_elements(const DeviceSegment* segments, int64_t num_segments, Update update) {
  const int64_t block = blockIdx.x;
  int64_t low = 0, high = num_segments;  // the segment of this block is in [low, high)
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].first_block <= block)
      low = middle;
    else
      high = middle;
  }
  const DeviceSegment segment = segments[low];
  const int64_t start =
      segment.start + (block - segment.first_block) * kElementsPerBlock + threadIdx.x;
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = start + int64_t{k} * kUpdateThreads;
    if (i < segment.end) update(i);
  }
}

/// Takes `grad_scale` from StepControl, if there is one; false if the step is to be skipped.
__device__ inline bool read_control(const double* control, double& grad_scale) {
  if (!control) return true;
  grad_scale = control[0];
  return control[1] != 0;
}

inline const double* device_control(const StepControl& control) {
  return control.defined() ? control.const_data_ptr<double>() : nullptr;
}

}  // namespace lockstep::kernels
