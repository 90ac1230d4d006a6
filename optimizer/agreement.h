#pragma once

// Internal: what must be the same on all ranks of a model before their first update.

#include <functional>

#include "lockstep/core/config.h"
#include "lockstep/optimizer/param_groups.h"
#include "lockstep/optimizer/update_statement.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Compares `config`, the numbers of `overrides` and what `rule` states, unless it is null, over
/// dp-cp, tp and pp, which together are all ranks. `own_checks` checks the arguments of this rank
/// first; errors as in check_same_parameters(). Ranks outside a group that finds a difference are
/// notified.
void check_same_optimizer(const ParallelState& state, const OptimizerConfig& config,
                          const std::vector<ParamOverride>& overrides, const UpdateStatement* rule,
                          const std::function<void()>& own_checks);

/// Whether `own` is true on any rank. Collective over the same groups.
bool any_rank(const ParallelState& state, bool own, const char* label);

}  // namespace lockstep
