#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// The `norm_type`-norm of the gradients of the whole model, (sum over elements |g|^p)^(1/p) or for
/// infinity the largest |g|, as a 0-dim fp64 tensor on the models' device; accumulated in fp64.
/// Every element of the global model counts exactly once, on whatever layout: of a parameter that
/// is replicated over tensor-parallel ranks, or tied between pipeline stages, one copy counts. What
/// two stages hold counts as two parameters unless it is tied (ParamDescription::tie) or its
/// gradient is declared partial over pp, because nothing else tells that they are one: a parameter
/// that all stages hold with complete gradients counts once for each of them. A gradient that is
/// NaN or infinite makes it NaN or infinite, on whichever of the ranks that hold its parameter. The
/// bits are the same on all ranks, so that ranks which decide by it decide the same.
///
/// `models` are the wrapped chunks of the model of this rank, with final gradients (see
/// finalize_model_grads). Collective over the ranks that share the model: tp-pp and, where experts
/// have a grid of their own, tp-ep-pp; with the distributed optimizer intra-optimizer. One
/// all-reduce of 8 bytes over each, a second one if norm_type is neither 2 nor infinity (then the
/// elements are divided by the largest first, so that no power overflows); nothing is sent where
/// these groups have one rank. On the CPU a 2-norm that is infinite is looked at again, with one
/// more all-reduce, and computed so, with a third one, if all gradients are finite: those of fp64
/// beyond 1e154. On CUDA, where nobody waits for the device, it stays infinite. UsageError: no
/// model, gradients that are not final, a norm_type below 1; ranks that wait for this one are told.
at::Tensor grad_norm(const std::vector<DistributedDataParallel*>& models, double norm_type = 2);

/// The factor by which gradients of norm `norm` are multiplied so that they have `max_norm` at
/// most: max_norm / (norm + 1e-6) where that is less than 1, else 1. A `max_norm` of 0 means no
/// clipping.
double clip_coefficient(double norm, double max_norm);

/// Scales the gradients down to a norm of `max_norm` where they exceed it. Returns the norm before
/// clipping. Gradients whose norm is not finite are left alone. On CUDA it waits for the device.
/// UsageError: max_norm is no positive number, and those of grad_norm().
double clip_grad_norm_(const std::vector<DistributedDataParallel*>& models, double max_norm,
                       double norm_type = 2);

/// Whether an optimizer leaves out the step of gradients with this norm: it is not finite, or more
/// than optimizer.grad_norm_skip_threshold. With the result of grad_norm() all ranks decide the
/// same.
bool skips_step(double norm, const OptimizerConfig& config);

/// Number of elements of the global model whose gradient is exactly zero (0-dim, int64, on the
/// models' device). Elements are counted, and ranks communicate, as in grad_norm().
at::Tensor count_zeros(const std::vector<DistributedDataParallel*>& models);

}  // namespace lockstep
