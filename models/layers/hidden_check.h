#pragma once

#include <cstdint>
#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/models/layer_context.h"

namespace lockstep {

/// Checks the input of a transformer layer.
class HiddenCheck {
 public:
  /// A layer without a name is called by its `kind`.
  HiddenCheck(const LayerContext& context, const char* kind);

  /// UsageError, "<layer>: found an input [2, 3] of Float, allowed: [sequence, batch, 4] of
  /// Double", unless `hidden` has three dimensions, the last of them hidden_size, and the dtype of
  /// the layer. Looks only at sizes.
  void operator()(const at::Tensor& hidden) const;

 private:
  std::string label_;
  int64_t width_;
  at::ScalarType dtype_;
};

}  // namespace lockstep
