#pragma once

// Internal.

#include <ATen/core/Tensor.h>

namespace lockstep::testing {

/// A tensor without values on `device`, which must have an index.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           c10::Device device);

/// Gives the storage new memory of `bytes`. A task on the current stream copies the contents.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// Gives `tensor`, on the device, these sizes and strides, and more memory if needed.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace lockstep::testing
