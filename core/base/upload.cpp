#include "lockstep/core/upload.h"

#include <ATen/ATen.h>

namespace lockstep {

at::Tensor upload(const at::Tensor& host, c10::Device device) {
  if (device.is_cpu()) return host;
  if (device.is_meta()) return host.to(device);  // a planned device copies nothing
  return host.pin_memory().to(device, host.scalar_type(), /*non_blocking=*/true);
}

void upload_to(const at::Tensor& target, const at::Tensor& host) {
  target.copy_(target.is_cpu() || target.is_meta() ? host : host.pin_memory(),
               /*non_blocking=*/true);
}

}  // namespace lockstep
