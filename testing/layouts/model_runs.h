#pragma once

// Internal: the runs that are compared.

#include <mutex>
#include <vector>

#include "lockstep/testing/layout_check.h"
#include "lockstep/testing/step_record.h"

namespace lockstep::testing {

/// The model, its loss and the options of a check.
struct CheckedModel {
  const MakeModule& make;
  const StageLoss& loss;
  const CheckOptions& options;

  bool per_token() const;
  ParallelContext context(const ParallelState& state, bool sequence_parallel) const;
};

/// The steps in one process: plain autograd, and an Optimizer for the update. UsageError: no
/// parameter that is trained.
RunRecord run_in_one_process(const CheckedModel& model);

/// The run of the ranks of a layout. If `reference` reveals wrong shapes, nothing is trained.
struct LayoutRun {
  std::vector<RunRecord> ranks;
  std::optional<Finding> finding = {};  ///< of parameters that do not fit, or an exception
};
LayoutRun run_on_ranks(const CheckedModel& model, const RankLayout& layout,
                       const RunRecord& reference);

/// Parameters of the ranks that are not pieces of those in one process; unset: all are.
std::optional<Finding> wrong_parameter(const RunRecord& reference,
                                       const std::vector<RunRecord>& ranks,
                                       const RankLayout& layout);

}  // namespace lockstep::testing
