#pragma once

namespace lockstep {

/// The factor by which the training loop multiplies the loss of one token before backward: 1 if
/// losses are summed, 1 / (tokens of this rank's micro-batch * micro-batches) if they are averaged,
/// times the loss scale. The losses of routers are added in backward to each token's own loss, at
/// this scale. The loop may change it between steps.
struct TokenLossScale {
  double value = 1;
};

}  // namespace lockstep
