#include <cuda_bf16.h>

#include <cmath>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>

#include "lockstep/kernels/adamw_cuda.h"

namespace lockstep::kernels {
namespace {

constexpr int kThreads = 256;
constexpr int kElementsPerThread = 8;
constexpr int64_t kElementsPerBlock = int64_t{kThreads} * kElementsPerThread;

/// A segment as the device reads it; `weight_decay` is 0 or 1.
struct DeviceSegment {
  int64_t start, end, weight_decay;
};

template <class T>
struct Coefficients {
  T decay, grad_scale, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, root_correction2,
      step_size;
};

template <class T, class Grad>
__global__ void adamw_kernel(T* p, const Grad* g, T* m, T* v, __nv_bfloat16* low_precision,
                             const DeviceSegment* segments, int64_t num_segments,
                             Coefficients<T> c) {
  const int64_t block_start = segments[0].start + blockIdx.x * kElementsPerBlock;
  // First segment that ends behind the block's start.
  int64_t low = 0, high = num_segments;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (segments[middle].end <= block_start)
      low = middle + 1;
    else
      high = middle;
  }
  int64_t segment = low;
  for (int k = 0; k < kElementsPerThread; ++k) {
    const int64_t i = block_start + int64_t{k} * kThreads + threadIdx.x;
    while (segment < num_segments && segments[segment].end <= i) ++segment;
    if (segment == num_segments) return;
    if (i < segments[segment].start) continue;
    const T grad = static_cast<T>(g[i]) * c.grad_scale;
    const T mean = m[i] * c.beta1 + grad * c.one_minus_beta1;
    const T square = v[i] * c.beta2 + grad * grad * c.one_minus_beta2;
    m[i] = mean;
    v[i] = square;
    const T decayed = segments[segment].weight_decay ? p[i] * c.decay : p[i];
    const T updated = decayed - c.step_size * mean / (sqrt(square) / c.root_correction2 + c.eps);
    p[i] = updated;
    if (low_precision) low_precision[i] = __float2bfloat16_rn(static_cast<float>(updated));
  }
}

template <class T, class Grad>
void launch(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
            const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
            const at::Tensor& segment_table, int64_t blocks, const AdamWScalars& s) {
  const Coefficients<T> c = {static_cast<T>(1 - s.learning_rate * s.weight_decay),
                             static_cast<T>(s.grad_scale),
                             static_cast<T>(s.beta1),
                             static_cast<T>(s.beta2),
                             static_cast<T>(1 - s.beta1),
                             static_cast<T>(1 - s.beta2),
                             static_cast<T>(s.eps),
                             static_cast<T>(std::sqrt(s.bias_correction2)),
                             static_cast<T>(s.learning_rate / s.bias_correction1)};
  auto* const low = low_precision.defined()
                        ? reinterpret_cast<__nv_bfloat16*>(low_precision.data_ptr<at::BFloat16>())
                        : nullptr;
  adamw_kernel<T, Grad>
      <<<static_cast<unsigned>(blocks), kThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
          master.data_ptr<T>(), static_cast<const Grad*>(grad.const_data_ptr()),
          exp_avg.data_ptr<T>(), exp_avg_sq.data_ptr<T>(), low,
          reinterpret_cast<const DeviceSegment*>(segment_table.const_data_ptr<int64_t>()),
          segment_table.size(0), c);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void adamw_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const std::vector<AdamWSegment>& segments, const AdamWScalars& scalars) {
  if (segments.empty()) return;
  at::Tensor table = at::empty({static_cast<int64_t>(segments.size()), 3}, at::kLong);
  auto* row = table.mutable_data_ptr<int64_t>();
  for (const AdamWSegment& segment : segments) {
    *row++ = segment.start;
    *row++ = segment.end;
    *row++ = segment.weight_decay;
  }
  table = table.to(master.device());
  const int64_t span = segments.back().end - segments.front().start;
  const int64_t blocks = (span + kElementsPerBlock - 1) / kElementsPerBlock;
  const auto launch_for = master.scalar_type() == at::kDouble   ? launch<double, double>
                          : grad.scalar_type() == at::kBFloat16 ? launch<float, __nv_bfloat16>
                                                                : launch<float, float>;
  launch_for(master, grad, exp_avg, exp_avg_sq, low_precision, table, blocks, scalars);
}

}  // namespace lockstep::kernels
