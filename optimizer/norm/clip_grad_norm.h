#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/mesh_parameters.h"

namespace lockstep {

/// torch.nn.utils.clip_grad_norm_ for parameters that lie on meshes: multiplies the gradients by
/// max_norm / (norm + 1e-6) where that is less than 1, in place, and returns the norm before, 0-dim
/// fp64 on their device, accumulated in fp64 whatever the gradients' dtype. The host waits for the
/// device only if `error_if_nonfinite`. For models under DistributedDataParallel see clip_grads.h.
///
/// `parameters`: DTensors on any number of meshes and plain tensors together. The gradients are
/// final, and this rank has them whole: those that DistributedDataParallel shards
/// (ddp.use_distributed_optimizer) are clipped by the form of clip_grads.h. Each element of the
/// whole counts once: a sharded dimension is put together over the axes that shard it, one copy of
/// a replicated one counts, a plain tensor counts as it is, a parameter that is listed twice once.
/// Parameters without a gradient are left out; their ranks take part in the communication all the
/// same.
///
/// `max_norm`: unset, nothing is clipped. `norm_type`: any p > 0, or infinity. `foreach`: false
/// multiplies the gradients one by one, otherwise all fp32 and fp64 ones of a device in one call;
/// the values are the same.
///
/// A gradient may be strided in any way; of one that was expanded each element of the expanded
/// shape counts. A complex element counts with its absolute value, as in PyTorch.
///
/// `pp_mesh`: the pipeline stages of this rank, which hold different parameters; the sum runs over
/// them too, and every stage calls this, also one without parameters. A parameter of several stages
/// (a tied embedding) is a DTensor on a mesh that holds those stages and replicates it over them:
/// the first of them counts it.
///
/// Collective: one all-reduce of 8 bytes for every distinct group of ranks that shards a parameter,
/// in an order that is the same on all ranks, then one over pp_mesh; twice that if norm_type is
/// neither 2 nor infinity. The bits of the norm are the same on all ranks that hold the same plain
/// tensors. A norm that is not finite spoils the gradients as in PyTorch.
///
/// Parameters of a described module come from mesh_parameters(), or from the module itself, below.
///
/// UsageError: a norm_type that is not positive, a max_norm below 0; by name, an undefined tensor,
/// a Partial parameter, one without a mesh that is described as cut or as one of several stages'
/// beside a pp_mesh, a gradient that is sparse, of a dtype other than fp64, fp32, bf16, fp16 and
/// complex of fp64 or fp32, or, if it is to be clipped, whose elements share memory in another way
/// than by expand(): the other ranks raise CommunicationError; a norm that is not finite, if
/// `error_if_nonfinite`, on every rank and before anything is changed, naming this rank's first
/// parameter with such a gradient; a gradient that a front has taken over and not reduced yet, or
/// shards, and one of a described parameter that finalize_model_grads() has yet to change, naming
/// the front and what to call.
at::Tensor clip_grad_norm_(const MeshParameters& parameters, std::optional<double> max_norm,
                           double norm_type = 2, bool error_if_nonfinite = false,
                           std::optional<bool> foreach = {},
                           const std::optional<DeviceMesh>& pp_mesh = {});

/// The same for the parameters of `module` as their descriptions say (see mesh_parameters()), over
/// all pipeline stages of `state`, each of which calls it. UsageError also as of mesh_parameters().
at::Tensor clip_grad_norm_(const torch::nn::Module& module, const ParallelState& state,
                           std::optional<double> max_norm, double norm_type = 2,
                           bool error_if_nonfinite = false, std::optional<bool> foreach = {});

}  // namespace lockstep
