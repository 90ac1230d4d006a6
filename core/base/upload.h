#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace lockstep {

/// `host`, a tensor on the CPU, on `device`, without waiting for the device: it is copied into
/// page-locked memory first, and from there by the device's current stream. On the CPU it is `host`
/// itself.
at::Tensor upload(const at::Tensor& host, c10::Device device);

/// The same into an existing tensor of that shape and dtype. It has the values once the stream has
/// reached this point.
void upload_to(const at::Tensor& target, const at::Tensor& host);

}  // namespace lockstep
