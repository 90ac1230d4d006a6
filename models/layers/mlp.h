#pragma once

#include <memory>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/layer_context.h"
#include "lockstep/models/layers/linear.h"

namespace lockstep {

/// The feed-forward network. Children:
///
/// - `linear_fc1`: weight [ffn_hidden_size, hidden_size]; with SwiGLU [2 ffn_hidden_size,
///   hidden_size], the gate's rows first
/// - `linear_fc2`: weight [hidden_size, ffn_hidden_size]
class MLP : public DescribedModule {
 public:
  explicit MLP(const LayerContext& context);

  /// `hidden` [sequence, batch, hidden_size] -> the same shape
  at::Tensor forward(const at::Tensor& hidden) const;

 private:
  Activation activation_;
  std::shared_ptr<Linear> linear_fc1_;
  std::shared_ptr<Linear> linear_fc2_;
};

}  // namespace lockstep
