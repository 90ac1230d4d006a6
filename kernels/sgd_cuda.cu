#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/flat_update.cuh"

namespace lockstep::kernels {
namespace {

struct SgdOperands {
  DeviceValues g, b, low;
};

template <class T>
__global__ void sgd_kernel(T* p, SgdOperands o, const DeviceSegment* segments, int64_t num_segments,
                           T rate, T momentum, T decay, double grad_scale, const double* control,
                           bool control_has_all) {
  if (!read_control(control, grad_scale)) return;
  if (control_has_all) {
    rate = static_cast<T>(control[2]);
    decay = static_cast<T>(control[3]);
  }
  const T scale = static_cast<T>(grad_scale);
  for_elements(segments, num_segments, [&](int64_t i) {
    T step = o.g.load<T>(i) * scale + p[i] * decay;
    if (o.b.data) step += o.b.load<T>(i) * momentum;
    o.b.store(i, step);
    const T updated = p[i] - rate * step;
    p[i] = updated;
    o.low.store(i, updated);
  });
}

template <class T>
void launch(const at::Tensor& master, const SgdOperands& operands, const DeviceSegments& segments,
            const SgdScalars& s, const StepControl& control) {
  sgd_kernel<T><<<segments.blocks, kUpdateThreads, 0, c10::cuda::getCurrentCUDAStream()>>>(
      master.data_ptr<T>(), operands, segments.data(), segments.size(),
      static_cast<T>(s.learning_rate), static_cast<T>(s.momentum), static_cast<T>(s.weight_decay),
      s.grad_scale, device_control(control), control.defined() && control.numel() == kSgdControl);
  C10_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void sgd_cuda(const at::Tensor& master, const at::Tensor& grad, const at::Tensor& momentum_buffer,
              const at::Tensor& low_precision, const UpdateSegments& segments,
              const SgdScalars& scalars, const StepControl& control) {
  if (segments.empty()) return;
  const DeviceSegments table(segments, master.device());
  const SgdOperands operands = {DeviceValues(grad), DeviceValues(momentum_buffer),
                                DeviceValues(low_precision)};
  if (master.scalar_type() == at::kDouble)
    launch<double>(master, operands, table, scalars, control);
  else
    launch<float>(master, operands, table, scalars, control);
}

}  // namespace lockstep::kernels
