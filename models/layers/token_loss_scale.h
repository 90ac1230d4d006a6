#pragma once

namespace lockstep {

/// How a training loop scales the losses of tokens before backward. The losses of routers are added
/// in backward to each token's own loss, at this scale. The loop may change it between steps.
struct TokenLossScale {
  /// The factor of one token's loss: 1 if losses are summed, 1 / (tokens of this rank's micro-batch
  /// * micro-batches) if they are averaged, times the loss scale (Optimizer::loss_scale()).
  double value = 1;
  /// Losses are averaged, and `value` counts padding (PaddingTokens) among the tokens: where there
  /// is padding, the routers' losses get a larger factor, so that their mean is over the other
  /// tokens. Read by forward, `value` by backward.
  bool averages = false;
};

}  // namespace lockstep
