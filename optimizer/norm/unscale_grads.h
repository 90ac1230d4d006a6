#pragma once

#include <vector>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// Whether any gradient of the whole model is NaN or infinite; all ranks get the same answer. In
/// the same pass over memory it multiplies all gradients by `inverse_scale`, 1 /
/// GradScaler::scale(). With 1 it only checks. An optimizer that computes grad_norm() in any case
/// need not call it: the norm is finite if and only if all gradients are, and the division becomes
/// part of the clipping factor.
///
/// `models` have final gradients (see finalize_model_grads). Collective like grad_norm(), with one
/// maximum of 8 bytes. Waits for the device. UsageError: no model, gradients that are not final, an
/// inverse_scale that is not a positive number.
bool found_inf(const std::vector<DistributedDataParallel*>& models, double inverse_scale = 1);

}  // namespace lockstep
