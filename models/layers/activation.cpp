#include "lockstep/models/activation.h"

#include <ATen/ATen.h>

namespace lockstep {

at::Tensor activate(Activation activation, const at::Tensor& inner) {
  if (activation != Activation::swiglu)
    return at::gelu(inner, activation == Activation::gelu_tanh ? "tanh" : "none");
  const auto halves = inner.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

}  // namespace lockstep
