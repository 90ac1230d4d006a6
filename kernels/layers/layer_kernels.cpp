#include "lockstep/kernels/layer_kernels.h"

namespace lockstep::kernels {

const DeviceKernels& layer_kernels(const char* kernel, const at::Tensor& tensor) {
  static const DeviceKernels on_cpu = {.cross_entropy = cross_entropy_cpu,
                                       .cross_entropy_losses = cross_entropy_losses_cpu,
                                       .cross_entropy_gradient = cross_entropy_gradient_cpu,
                                       .dropout = dropout_cpu,
                                       .norm = norm_cpu,
                                       .norm_gradient = norm_gradient_cpu,
                                       .rotary = rotary_cpu,
                                       .swiglu = swiglu_cpu,
                                       .swiglu_gradient = swiglu_gradient_cpu};
  return tensor.is_cpu() ? on_cpu : device_kernels(kernel, tensor.device().type());
}

}  // namespace lockstep::kernels
