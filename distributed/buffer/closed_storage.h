#pragma once

// Internal.

#include <ATen/core/Tensor.h>

namespace lockstep {

/// A storage as large as `storage`, but without memory: access to its data throws c10::Error with
/// `message`.
c10::Storage closed_twin(const c10::Storage& storage, const char* message);

/// Makes `tensor` a view of `storage`, at the same place.
void set_storage_of(const at::Tensor& tensor, const c10::Storage& storage);

}  // namespace lockstep
