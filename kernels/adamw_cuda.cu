#include <cmath>

#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/flat_update.cuh"

namespace lockstep::kernels {
namespace {

template <class T>
struct Coefficients {
  T decay, beta1, beta2, one_minus_beta1, one_minus_beta2, eps, inverse_root2, step_size;
};

struct AdamWOperands {
  DeviceValues g, m, v, low;
};

template <class T>
__global__ void adamw_kernel(T* p, AdamWOperands o, const DeviceSegment* segments,
                             int64_t num_segments, Coefficients<T> c, double grad_scale,
                             const double* control) {
  if (!read_control(control, grad_scale)) return;
  const T scale = static_cast<T>(grad_scale);
  for_elements(segments, num_segments, [&](int64_t i) {
    const T grad = o.g.load<T>(i) * scale;
    const T mean = o.m.load<T>(i) * c.beta1 + grad * c.one_minus_beta1;
    const T square = o.v.load<T>(i) * c.beta2 + grad * grad * c.one_minus_beta2;
    o.m.store(i, mean);
    o.v.store(i, square);
    const T updated =
        p[i] * c.decay - c.step_size * mean / (sqrt(square) * c.inverse_root2 + c.eps);
    p[i] = updated;
    o.low.store(i, updated);
  });
}

template <class T>
void launch(const at::Tensor& master, const AdamWOperands& operands, const DeviceSegments& segments,
            const AdamWScalars& s, const StepControl& control) {
  const Coefficients<T> c = {static_cast<T>(1 - s.learning_rate * s.weight_decay),
                             static_cast<T>(s.beta1),
                             static_cast<T>(s.beta2),
                             static_cast<T>(1 - s.beta1),
                             static_cast<T>(1 - s.beta2),
                             static_cast<T>(s.eps),
                             static_cast<T>(1 / std::sqrt(s.bias_correction2)),
                             static_cast<T>(s.learning_rate / s.bias_correction1)};
  adamw_kernel<T><<<segments.blocks, kUpdateThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      master.data_ptr<T>(), operands, segments.data(), segments.size(), c, s.grad_scale,
      device_control(control));
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void adamw_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& exp_avg,
                const at::Tensor& exp_avg_sq, const at::Tensor& low_precision,
                const UpdateSegments& segments, const AdamWScalars& scalars,
                const StepControl& control) {
  if (segments.empty()) return;
  const DeviceSegments table(segments, master.device());
  const AdamWOperands operands = {DeviceValues(grad), DeviceValues(exp_avg),
                                  DeviceValues(exp_avg_sq), DeviceValues(low_precision)};
  if (master.scalar_type() == at::kDouble)
    launch<double>(master, operands, table, scalars, control);
  else
    launch<float>(master, operands, table, scalars, control);
}

}  // namespace lockstep::kernels
