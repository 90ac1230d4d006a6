#include "lockstep/core/upload.h"

#include <ATen/ATen.h>

namespace lockstep {

namespace {

/// A planned device (meta) copies nothing.
at::Tensor pinned(const at::Tensor& host, c10::Device device) {
  return device.is_meta() ? host : host.pin_memory();
}

}  // namespace

at::Tensor upload(const at::Tensor& host, c10::Device device) {
  if (device.is_cpu()) return host;
  return pinned(host, device).to(device, host.scalar_type(), /*non_blocking=*/true);
}

void upload_to(const at::Tensor& target, const at::Tensor& host) {
  target.copy_(target.is_cpu() ? host : pinned(host, target.device()), /*non_blocking=*/true);
}

}  // namespace lockstep
