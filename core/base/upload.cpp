#include "lockstep/core/upload.h"

#include <ATen/ATen.h>

namespace lockstep {

at::Tensor upload(const at::Tensor& host, c10::Device device) {
  if (device.is_cpu()) return host;
  return host.pin_memory().to(device, host.scalar_type(), /*non_blocking=*/true);
}

}  // namespace lockstep
