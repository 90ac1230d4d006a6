#pragma once

// Internal.

#include <string>

#include <ATen/core/Tensor.h>

#include "lockstep/models/layer_context.h"

namespace lockstep {

/// UsageError, "<label>: found an input [2, 3] of Float, allowed: [..., 4] of Double", unless
/// `input` has `width` as its last dimension, at least `dims` dimensions and the dtype of `weight`.
/// Looks at sizes alone: nothing is read from a device.
void check_input(const at::Tensor& input, int64_t width, const at::Tensor& weight,
                 const std::string& label, int64_t dims = 1);

/// The same with a dtype that a normalization takes beside its weights: theirs, and bf16 and fp16
/// beside fp32.
void check_normalized(const at::Tensor& input, const at::Tensor& weight, const std::string& label);

/// What goes into a layer of a transformer.
class HiddenCheck {
 public:
  /// A layer without a name is called by its `kind`.
  HiddenCheck(const LayerContext& context, const char* kind);

  /// UsageError, "<layer>: found an input [2, 3] of Float, allowed: [sequence, batch, 4] of
  /// Double", unless `hidden` has three dimensions, the last of them hidden_size, and the dtype of
  /// the layer. Looks at sizes alone.
  void operator()(const at::Tensor& hidden) const;

 private:
  std::string label_;
  int64_t width_;
  at::ScalarType dtype_;
};

/// "[2, 3] of Float"
std::string form_of(const at::Tensor& tensor);

}  // namespace lockstep
