#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// The 2-norm of the gradients of the whole model, as a 0-dim fp64 tensor on the models' device.
/// Accumulated in fp64. Every element of the global model counts exactly once: a parameter that is
/// replicated over tensor-parallel ranks counts on the first of them. `models` are the wrapped
/// chunks of the model of this rank, with final gradients (see finalize_model_grads). Collective
/// over the ranks that share the model (tp-pp, for experts tp-ep-pp): one all-reduce of 8 bytes for
/// each of the two kinds that the model has; nothing is sent where these groups have one rank.
at::Tensor grad_norm(const std::vector<DistributedDataParallel*>& models);

/// The factor by which gradients of norm `norm` are multiplied so that they have `max_norm` at
/// most: max_norm / (norm + 1e-6) where that is less than 1, else 1. A `max_norm` of 0 means no
/// clipping.
double clip_coefficient(double norm, double max_norm);

/// Scales the gradients down to a norm of `max_norm` where they exceed it. Returns the norm before
/// clipping. Gradients whose norm is not finite are left alone. On CUDA it waits for the device.
/// UsageError: max_norm is no positive number, no model, gradients that are not final.
double clip_grad_norm_(const std::vector<DistributedDataParallel*>& models, double max_norm);

}  // namespace lockstep
