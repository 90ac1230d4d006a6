#pragma once

#include <vector>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// Whether any gradient of the whole model is NaN or infinite; all ranks get the same answer. In
/// the same pass over memory multiplies all gradients by `inverse_scale`, 1 / GradScaler::scale().
/// With 1 it only looks. An optimizer that computes grad_norm() in any case need not call it: the
/// norm is finite if and only if all gradients are, and the division goes into the factor of the
/// clipping.
///
/// `models` have final gradients (see finalize_model_grads). Collective as grad_norm(), with one
/// maximum of 8 bytes. Waits for the device. UsageError: no model, gradients that are not final, an
/// inverse_scale that is no positive number.
bool found_inf(const std::vector<DistributedDataParallel*>& models, double inverse_scale = 1);

}  // namespace lockstep
