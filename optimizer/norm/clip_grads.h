#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// The `norm_type`-norm of the gradients of the whole model, (sum over elements |g|^p)^(1/p) or the
/// largest |g| for infinity, as a 0-dim fp64 tensor on the models' device; accumulated in fp64.
/// Every element of the global model counts exactly once, whatever the layout: if a parameter is
/// replicated over tensor-parallel ranks, or tied between pipeline stages, one copy counts.
/// Parameters on two stages count as two parameters unless they are tied (ParamDescription::tie) or
/// their gradient is declared partial over pp, because nothing else shows that they are one. So a
/// parameter that all stages hold with complete gradients counts once for each stage. A NaN or
/// infinite gradient makes the norm NaN or infinite, whichever of the ranks that hold the parameter
/// has it. The bits of the norm are the same on all ranks, so all ranks make the same decision from
/// it.
///
/// `models` are the wrapped model chunks of this rank, with final gradients (see
/// finalize_model_grads). Collective over the ranks that share the model: tp-pp and, if experts
/// have their own grid, tp-ep-pp; with the distributed optimizer intra-optimizer. It takes one
/// all-reduce of 8 bytes over each group, and a second one if norm_type is neither 2 nor infinity
/// (then the elements are first divided by the largest, so that no power overflows). Groups of one
/// rank send nothing. On the CPU an infinite 2-norm is checked with one more all-reduce. If all
/// gradients are finite (fp64 values beyond 1e154), a third all-reduce computes it in this scaled
/// way. On CUDA, where the host does not wait for the device, it stays infinite. UsageError: no
/// model, gradients that are not final, a norm_type below 1; ranks that wait for this one are
/// notified.
at::Tensor grad_norm(const std::vector<DistributedDataParallel*>& models, double norm_type = 2);

/// The factor that reduces gradients of norm `norm` to at most `max_norm`: max_norm / (norm + 1e-6)
/// if that is less than 1, else 1. A `max_norm` of 0 means no clipping.
double clip_coefficient(double norm, double max_norm);

/// Scales the gradients down to a norm of `max_norm` if their norm exceeds it. Returns the norm
/// before clipping. Gradients whose norm is not finite are left alone. On CUDA it waits for the
/// device. UsageError: a max_norm that is not a positive number, and those of grad_norm().
///
/// Gradients of a scaled loss (fp16) still contain the scale here, and so does the returned norm.
/// With an Optimizer use optimizer.clip_grad, because Optimizer::step() takes the scale out before
/// it clips. With your own update call found_inf() first, which divides the gradients by the scale.
double clip_grad_norm_(const std::vector<DistributedDataParallel*>& models, double max_norm,
                       double norm_type = 2);

/// Whether an optimizer skips a step whose gradients have this norm: the norm is not finite, or
/// exceeds optimizer.grad_norm_skip_threshold. With the result of grad_norm() all ranks decide the
/// same.
bool skips_step(double norm, const OptimizerConfig& config);

/// Number of elements of the global model whose gradient is exactly zero (0-dim, int64, on the
/// models' device). Elements are counted, and ranks communicate, as in grad_norm(). Rows of padding
/// (ParamDescription::unpadded_rows), whose number depends on the layout, do not count: where tp,
/// etp or ep cuts such a parameter, its ranks first exchange the lengths of their pieces, which may
/// differ. Optimizer does so once.
at::Tensor count_zeros(const std::vector<DistributedDataParallel*>& models);

}  // namespace lockstep
