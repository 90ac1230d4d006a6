#pragma once

// Internal.

#include "lockstep/core/placement.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// What finalize_model_grads does to the gradient of such a parameter after the data-parallel
/// reduction, as an error describes a gradient that lacks it: "not divided by the tokens". The last
/// one if there are several; nullptr: nothing. The answer comes from the table of passes (kPasses
/// in finalize/), so that a pass is declared in one place.
const char* further_pass(const ParamDescription& description, const RankGrids& grids,
                         GradientScalingMode mode);

}  // namespace lockstep
