#pragma once

// Internal.

#include <ATen/core/Tensor.h>

namespace lockstep::testing {

/// A tensor without values on the device, which has an index.
at::Tensor empty_on_device(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           c10::Device device);

/// Other memory of `bytes`, into which a task on the current stream copies what the storage holds.
void resize_storage(const c10::Storage& storage, size_t bytes);

/// Makes `tensor`, on the device, one of these sizes and strides, with more memory where it lacks
/// it.
void resize_tensor(const at::Tensor& tensor, at::IntArrayRef sizes, at::IntArrayRef strides);

}  // namespace lockstep::testing
