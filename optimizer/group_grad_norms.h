#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// The gradient norm of each parameter group of an optimizer, over the whole model: groups of all
/// ranks that have equal settings count as one. Every element counts once on any layout, as in
/// grad_norm(), so that the squares add up to the square of that norm.
class GroupGradNorms {
 public:
  /// Collective over all ranks, which exchange their groups. The optimizer must outlive this
  /// object.
  explicit GroupGradNorms(const Optimizer& optimizer);

  /// The groups' names, as name_of() makes them; the same on all ranks, "default" first.
  const std::vector<std::string>& names() const { return names_; }

  /// fp64 [names] on the device of the models, the same bits on all ranks, of final gradients,
  /// without the loss scale. Collective like grad_norm(), with one all-reduce of 8 bytes per group.
  /// A norm is infinite if the squares of fp64 gradients overflow, beyond 1e154. UsageError:
  /// gradients that are not final.
  at::Tensor norms() const;

 private:
  const Optimizer& optimizer_;
  std::vector<std::string> names_;
  std::vector<CountedRanges> counted_;  ///< of each name
};

}  // namespace lockstep
