#pragma once

#include <string>
#include <vector>

#include "lockstep/distributed/mesh_parameters.h"
#include "lockstep/parallel_state/device_mesh.h"

namespace lockstep {

/// Averages the gradients of a model over the ranks that hold it, once, after backward, as in
/// Hugging Face's 3D example. For loops that keep no state between steps. Nothing overlaps
/// backward; for overlap use DistributedDataParallel or GradientSynchronizer.
///
/// `world_mesh` has the axes "dp" and "cp", and possibly others. With `use_ddp` another API reduces
/// over dp, and this function reduces over cp only; otherwise it reduces over dp and cp as one
/// group. Plain gradients and the local parts of DTensors are treated in the same way: each element
/// becomes the sum over the group times 1 / ranks. Note that a mean of means is not the mean over
/// tokens if ranks have different numbers of tokens.
///
/// Gradients are changed in place and stay the tensors that they were, also views of somebody's
/// buffer. They travel in buckets of at most 25 MiB of one dtype, the last parameters first, all
/// under way at once. First the ranks compare their lists (names, shapes, dtypes), with one
/// all-gather of 8 bytes a rank, and agree on who has a gradient, with one all-reduce of 4 bytes a
/// parameter: where some rank has one, all have one afterwards, those without counting as zeros;
/// where none has, none gets one.
///
/// Collective over the group; does nothing in one of a single rank. UsageError: an axis that the
/// mesh has not, an undefined tensor (if some ranks find these, the others throw
/// CommunicationError); on all ranks and by name, a gradient on any of them that is sparse, no
/// floating-point tensor, or whose elements share memory (an expanded tensor). CommunicationError:
/// on all ranks, lists that differ, with the first difference. UsageError, by name, also where a
/// module describes that dp and cp are not all: a gradient that is partial over another axis of
/// several ranks, an expert, a tie over pipeline stages; and where another front has taken the
/// gradient over and has not reduced it yet, or shards it.
void all_reduce_grads(const MeshParameters& model, const DeviceMesh& world_mesh, bool use_ddp);

/// The same for a module that describes its parameters: each gradient is reduced as
/// mesh_parameters() says, those that share their ranks and divisor together. A layer norm that is
/// partial over tp goes over dp, cp and tp at once, an expert over edp. The lists are compared over
/// the ranks of a pipeline stage; who has a gradient is agreed on in each group. Collective over
/// the ranks of a stage, over all ranks if something is reduced over pp. UsageError also as of
/// mesh_parameters(), and for a parameter that another front has taken over, naming both.
void all_reduce_grads(const torch::nn::Module& module, const ParallelState& state);

}  // namespace lockstep
