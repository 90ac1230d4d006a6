#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/mesh_parameters.h"

namespace lockstep {

/// torch.nn.utils.clip_grad_norm_ for parameters on meshes: multiplies the gradients in place by
/// max_norm / (norm + 1e-6) if that is less than 1, and returns the norm before clipping (0-dim,
/// fp64, on their device). The norm is accumulated in fp64, whatever the gradients' dtype. The host
/// waits for the device only if `error_if_nonfinite`. For models under DistributedDataParallel see
/// clip_grads.h.
///
/// `parameters`: DTensors on any number of meshes, and plain tensors. The gradients must be final,
/// and DistributedDataParallel must not shard them (ddp.use_distributed_optimizer); for sharded
/// gradients use clip_grads.h. Each element of the global parameters counts once: shards are summed
/// over the axes that shard a dimension, one copy of a replicated parameter counts, a plain tensor
/// counts as it is, and a parameter that is listed twice counts once. Parameters without a gradient
/// are left out; their ranks still take part in the communication.
///
/// `max_norm`: if unset, nothing is clipped. `norm_type`: any p > 0, or infinity. `foreach`: false
/// multiplies the gradients one by one; otherwise all fp32 and fp64 gradients of a device are
/// multiplied in one call. The values are the same.
///
/// A gradient may have any strides; in an expanded gradient each element of the expanded shape
/// counts. A complex element counts with its absolute value, as in PyTorch.
///
/// `pp_mesh`: the pipeline stages of this rank, which hold different parameters. The sum includes
/// all stages, so every stage must make this call, even one without parameters. A parameter of
/// several stages (a tied embedding) must be a DTensor on a mesh that contains those stages,
/// replicated over them; the first of the stages counts it.
///
/// Collective: one all-reduce of 8 bytes for every distinct group of ranks that shards a parameter,
/// in the same order on all ranks, then one over pp_mesh; twice that if norm_type is neither 2 nor
/// infinity. The bits of the norm are the same on all ranks that hold the same plain tensors. If
/// the norm is not finite, clipping corrupts the gradients, as in PyTorch.
///
/// For a described module, pass mesh_parameters(), or the module itself to the overload below.
///
/// UsageError, while the other ranks throw CommunicationError: a norm_type that is not positive; a
/// max_norm below 0; naming the parameter: an undefined tensor; a Partial parameter; a parameter
/// without a mesh that is described as cut or, with a pp_mesh, as held by several stages; a
/// gradient that is sparse, has a dtype other than fp64, fp32, bf16, fp16 and complex of fp64 or
/// fp32, or, if it is to be clipped, whose elements share memory in a way other than by expand().
/// UsageError, naming the front and what to call: a gradient that a front manages and has not
/// reduced yet, or shards; a gradient of a described parameter that finalize_model_grads() has yet
/// to change. UsageError on every rank, before anything is changed, with `error_if_nonfinite`: a
/// norm that is not finite, naming this rank's first parameter with such a gradient.
at::Tensor clip_grad_norm_(const MeshParameters& parameters, std::optional<double> max_norm,
                           double norm_type = 2, bool error_if_nonfinite = false,
                           std::optional<bool> foreach = {},
                           const std::optional<DeviceMesh>& pp_mesh = {});

/// The same for the parameters of `module` as their descriptions say (see mesh_parameters()), over
/// all pipeline stages of `state`, each of which calls it. Also throws the UsageErrors of
/// mesh_parameters().
at::Tensor clip_grad_norm_(const torch::nn::Module& module, const ParallelState& state,
                           std::optional<double> max_norm, double norm_type = 2,
                           bool error_if_nonfinite = false, std::optional<bool> foreach = {});

}  // namespace lockstep
