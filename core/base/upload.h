#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace lockstep {

/// `host`, a tensor on the CPU, on `device`, without waiting for that: copied into page-locked
/// memory first, and from there by the device's current stream. On the CPU `host` itself.
at::Tensor upload(const at::Tensor& host, c10::Device device);

/// The same into a tensor of that shape and dtype that is there. It has the values once the stream
/// has come by.
void upload_to(const at::Tensor& target, const at::Tensor& host);

}  // namespace lockstep
