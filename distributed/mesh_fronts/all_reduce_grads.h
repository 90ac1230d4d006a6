#pragma once

#include <string>
#include <vector>

#include "lockstep/distributed/mesh_parameters.h"
#include "lockstep/parallel_state/device_mesh.h"

namespace lockstep {

/// Averages the gradients of a model over the ranks that hold it, once, after backward, as in
/// Hugging Face's 3D example. For loops that keep no state between steps. Nothing overlaps
/// backward; for overlap use DistributedDataParallel or GradientSynchronizer. All ranks must start
/// from the same weights; nothing is broadcast.
///
/// `world_mesh` has the axes "dp" and "cp", and possibly others. With `use_ddp` another API reduces
/// over dp, and this function reduces over cp only; otherwise it reduces over dp and cp as one
/// group. Plain gradients and the local parts of DTensors are treated in the same way: each element
/// becomes the sum over the group times 1 / ranks. Note that a mean of means is not the mean over
/// tokens if ranks have different numbers of tokens.
///
/// Gradients are changed in place: they stay the same tensors, even if they are views of another
/// buffer. They are sent in buckets of at most 25 MiB of one dtype, the last parameters first, all
/// in flight at once. First the ranks compare their lists (names, shapes, dtypes) with one
/// all-gather of 8 bytes per rank, and agree on who has a gradient, and of which dtype, with one
/// all-reduce of 4 bytes per parameter. If some rank has a gradient, all ranks have one of its
/// dtype afterwards, and missing ones count as zeros. If no rank has one, none gets one.
///
/// Collective over the group; does nothing in a group of one rank. UsageError: an axis that the
/// mesh does not have, or an undefined tensor (if only some ranks find these, the others throw
/// CommunicationError). UsageError on all ranks, naming the parameter: a gradient on any rank that
/// is sparse, is not a floating-point tensor, or whose elements share memory (an expanded tensor),
/// and gradients of several dtypes. CommunicationError on all ranks, with the first difference:
/// lists that differ. UsageError, naming the parameter: a description for which reducing over dp
/// and cp is not enough (a gradient that is partial over another axis of several ranks, an expert,
/// a tie over pipeline stages), or a gradient that another front manages and has not reduced yet,
/// or shards. Ranks outside the group that wait for one that throws throw CommunicationError.
void all_reduce_grads(const MeshParameters& model, const DeviceMesh& world_mesh, bool use_ddp);

/// The same for a module that describes its parameters: each gradient is reduced as
/// mesh_parameters() says. Gradients with the same ranks and divisor are reduced together. A layer
/// norm that is partial over tp is reduced over dp, cp and tp at once, an expert over edp. The
/// ranks of a pipeline stage compare their lists; each group agrees on who has a gradient. A group
/// of several stages also compares what it reduces (8 bytes per rank): CommunicationError on all
/// its ranks, with the first difference, if names, order, shapes, dtypes or descriptions differ.
/// Collective over the ranks of a stage, or over all ranks if something is reduced over pp: a stage
/// that holds nothing of that kind is waited for until the timeout. Also throws the UsageErrors of
/// mesh_parameters(), and UsageError for a parameter that another front manages, naming both. What
/// a stage or a group refuses also ends the ranks outside it, as above.
void all_reduce_grads(const torch::nn::Module& module, const ParallelState& state);

}  // namespace lockstep
