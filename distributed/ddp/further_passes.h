#pragma once

// Internal.

#include "lockstep/core/placement.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/parallel_state/rank_grids.h"

namespace lockstep {

/// What finalize_model_grads does to the gradient of such a parameter after the data-parallel
/// reduction, as an error tells of a gradient that lacks it: "not divided by the tokens". Of
/// several the last; nullptr: nothing. The table of passes answers (kPasses in finalize/), so that
/// a pass is stated in one place.
const char* further_pass(const ParamDescription& description, const RankGrids& grids,
                         GradientScalingMode mode);

}  // namespace lockstep
