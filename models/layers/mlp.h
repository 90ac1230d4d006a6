#pragma once

#include <cstdint>
#include <memory>

#include "lockstep/core/parameters.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/linear.h"

namespace lockstep {

/// The second half of a transformer layer.
class FeedForward : public DescribedModule {
 public:
  /// `hidden` [sequence, batch, hidden_size], with sequence parallelism this rank's [sequence /
  /// ranks, ...] -> the same shape. Adapters need `tokens` for their dropout.
  virtual at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens = {}) const = 0;
};

/// The dense feed-forward network, cut over tp. Children:
///
/// - `linear_fc1`: column-parallel, weight [width, hidden_size]; with SwiGLU [2, width,
///   hidden_size], the gate first
/// - `linear_fc2`: row-parallel, weight [hidden_size, width]
class MLP : public FeedForward {
 public:
  MLP(const LayerContext& context, int64_t width);
  /// `spec` as mlp_params() returns it.
  MLP(const LayerContext& context, const ModuleSpec& spec);

  at::Tensor forward(const at::Tensor& hidden, const TokenPositions& tokens = {}) const override;

 private:
  Activation activation_;
  std::shared_ptr<ColumnParallelLinear> linear_fc1_;
  std::shared_ptr<RowParallelLinear> linear_fc2_;
};

}  // namespace lockstep
