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

/// Sets the coefficients that depend on `control`; rounded step by step, as on the host.
template <class T>
__device__ void take_from(const double* control, Coefficients<T>& c) {
  const double rate = control[2], decay = control[3];
  c.decay = static_cast<T>(__dsub_rn(1, __dmul_rn(rate, decay)));
  c.inverse_root2 = static_cast<T>(__ddiv_rn(1, __dsqrt_rn(control[5])));
  c.step_size = static_cast<T>(__ddiv_rn(rate, control[4]));
}

template <class T>
__global__ void adamw_kernel(T* p, AdamWOperands o, const DeviceSegment* segments,
                             int64_t num_segments, Coefficients<T> given, double grad_scale,
                             const double* control, bool control_has_all) {
  if (!read_control(control, grad_scale)) return;
  const T scale = static_cast<T>(grad_scale);
  __shared__ Coefficients<T> taken;
  if (control_has_all) {
    if (threadIdx.x == 0) {
      taken = given;
      take_from(control, taken);
    }
    __syncthreads();
  }
  const Coefficients<T> c = control_has_all ? taken : given;
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
      device_control(control), control.defined() && control.numel() == kAdamWControl);
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
