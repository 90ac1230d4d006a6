#pragma once

// Internal: which gradients a rank counts in a number that describes the whole model, and how the
// ranks put their parts of it together.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// What to do with the padding between parameters, which is zero.
enum class Gaps {
  included,  ///< where it saves a piece
  excluded,
};

/// Flat pieces of gradients, of dense parameters and of experts.
struct GradPieces {
  std::vector<at::Tensor> dense;
  std::vector<at::Tensor> expert;
};

/// The gradients that this rank holds and counts, so that over the ranks each element of the model
/// is counted once. With the distributed optimizer a rank holds its shard. Of ranks that hold the
/// same the first one counts: tp for dense parameters that are replicated there, etp and ep for
/// experts, the first stage (and there the first model chunk) for tied parameters and for those
/// whose gradient is reduced over pp. UsageError naming `caller`: no model, gradients that are not
/// final, models with and without the distributed optimizer together.
GradPieces counted_grads(const std::vector<DistributedDataParallel*>& models, Gaps gaps,
                         const char* caller);

/// All gradients that this rank holds, counted elsewhere or not. Errors as above.
GradPieces held_grads(const std::vector<DistributedDataParallel*>& models, const char* caller);

/// Combines a number that each rank has of its dense gradients with one of its experts' (0-dim, on
/// the models' device) into one of the whole model, which has the same bits on all ranks. `op`: sum
/// or max. Every rank calls it, whichever parameters it has. Collective over the ranks that share
/// the model: tp-pp for the dense number and tp-ep-pp for the experts', one all-reduce if these
/// groups have the same ranks, none where they have one; with the distributed optimizer one
/// all-reduce over intra-optimizer.
at::Tensor combine_over_model(const std::vector<DistributedDataParallel*>& models,
                              const at::Tensor& dense, const at::Tensor& expert, ReduceOp op,
                              const char* label);

/// The sum of the squares of a flat tensor (0-dim, fp64, on its device).
at::Tensor sum_of_squares(const at::Tensor& flat);

/// `flat` in parts that fit the cache on the CPU; in one on other devices.
std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat);

}  // namespace lockstep
