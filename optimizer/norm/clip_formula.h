#pragma once

// Internal.

#include <ATen/ATen.h>

namespace lockstep {

/// max_norm / (norm + 1e-6), torch.nn.utils.clip_grad_norm_'s formula. `Norm`: double or a 0-dim
/// tensor.
template <class Norm>
Norm clip_ratio(const Norm& norm, double max_norm) {
  return max_norm / (norm + 1e-6);
}

/// The factor that reduces gradients of norm `norm` to at most `max_norm`: the ratio if it is less
/// than 1, otherwise 1. For a norm that is NaN the number is 1 and the tensor NaN.
inline double clip_factor(double norm, double max_norm) {
  const double ratio = clip_ratio(norm, max_norm);
  return ratio < 1 ? ratio : 1;
}
inline at::Tensor clip_factor(const at::Tensor& norm, double max_norm) {
  return clip_ratio(norm, max_norm).clamp_max(1);
}

}  // namespace lockstep
