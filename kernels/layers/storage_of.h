#pragma once

// Internal: the types of the bodies, selected by tensors.

#include <ATen/core/Tensor.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/float_storage.h"

namespace lockstep::kernels {

/// Calls `run` with a value of the type in which elements of `dtype` are stored. UsageError, naming
/// `kernel`: no kernel computes with `dtype`.
template <class Run>
void for_storage(const char* kernel, at::ScalarType dtype, Run run) {
  if (dtype == at::kFloat) return run(float{});
  if (dtype == at::kDouble) return run(double{});
  if (dtype == at::kBFloat16) return run(Bf16{});
  if (dtype == at::kHalf) return run(Fp16{});
  fail<UsageError>("{}: found tensors of {}, allowed: Float, Double, BFloat16, Half", kernel,
                   at::toString(dtype));
}

/// The dtype that a body for elements of `dtype` computes in; see for_storage().
inline at::ScalarType wide_dtype(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

/// The elements of `tensor` as T; null for an undefined tensor.
template <class T>
T* elements(const at::Tensor& tensor) {
  return tensor.defined() ? static_cast<T*>(tensor.data_ptr()) : nullptr;
}

}  // namespace lockstep::kernels
