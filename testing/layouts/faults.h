#pragma once

// Internal: from a difference to its cause.

#include <optional>
#include <string>
#include <vector>

#include "lockstep/testing/layout_check.h"
#include "lockstep/testing/step_record.h"

namespace lockstep::testing {

/// A layout's ranks compared with one process, in one step.
struct Comparison {
  const RunRecord& reference;
  const std::vector<RunRecord>& ranks;
  const RankLayout& layout;
  const CheckOptions& options;
  bool per_token;
  RankGrids grids;
  size_t step;

  const StepRecord& whole() const { return reference.steps[step]; }
  const StepRecord& of_rank(int64_t rank) const {
    return ranks[static_cast<size_t>(rank)].steps[step];
  }
  /// nullptr: the rank has no such parameter.
  const NamedParameter* find(int64_t rank, const std::string& name) const;
  /// The rank's piece of a tensor that belongs to the parameter.
  at::Tensor piece(int64_t rank, const NamedParameter& param, const at::Tensor& of_whole) const;
  /// The largest difference of gradients that is allowed: an absolute number.
  double tolerance() const;
};

/// The place where the activations or the loss of the ranks differ from those of one process;
/// unset: they do not.
std::optional<Finding> forward_fault(const Comparison& comparison);

/// A use of the parameter that one process has in forward and no rank has; unset: none.
std::optional<Finding> unseen_use(const Comparison& comparison, const std::string& param);

/// The gradient that is wrong after the reduction, and why; unset: none is. Sets
/// `difference`, the largest one relative to the largest gradient.
std::optional<Finding> gradient_fault(const Comparison& comparison, double& difference);

/// "2 times", "1/3 of"
std::string times(double factor);

}  // namespace lockstep::testing
