#pragma once

// Internal: the rules of optimizer.optimizer.

#include <memory>

#include "lockstep/core/config.h"
#include "lockstep/optimizer/update_rule.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// The rule of a buffer; see update_statement(), which says what it keeps. `own`, unless null,
/// takes the place of optimizer.optimizer.
std::shared_ptr<const UpdateRule> update_rule(const OptimizerConfig& config, bool whole_matrices,
                                              const ParallelState& parallel_state,
                                              const std::shared_ptr<const UpdateRule>& own);

}  // namespace lockstep
