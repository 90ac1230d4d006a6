#pragma once

// Inputs for the kernels of layers.

#include <ATen/ATen.h>

namespace lockstep::kernels {

inline const auto kDtypes = {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf};

inline at::Tensor wave_of(at::IntArrayRef shape, double seed, at::ScalarType dtype = at::kDouble) {
  const at::Tensor x = at::arange(c10::multiply_integers(shape), at::kDouble);
  return (at::sin(x * 0.7 + seed) * 2 + at::cos(x * 1.3)).view(shape).to(dtype);
}

/// The same values, one element after an address that is a multiple of 64 bytes.
inline at::Tensor misaligned(const at::Tensor& x) {
  const at::Tensor copy = at::empty({x.numel() + 1}, x.options()).narrow(0, 1, x.numel());
  return copy.view(x.sizes()).copy_(x);
}

}  // namespace lockstep::kernels
