#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// What finalize_model_grads did.
struct FinalizeReport {
  /// One collective.
  struct Entry {
    std::string pass;       ///< "data-parallel", "num_tokens"
    std::string group;      ///< "dp-cp [0, 1]"
    std::string operation;  ///< "all-reduce sum"
    int64_t bytes = 0;      ///< contributed by this rank
    int64_t parameters = 0;
  };
  std::vector<Entry> entries;  ///< in the order of the passes

  /// Tokens of the global batch, at least 1 (0-dim, fp64, on the gradients' device). Undefined
  /// without per-token scaling.
  at::Tensor num_tokens;
};

/// Makes the gradients of a step final, between the last backward and clipping or the optimizer.
/// Call it once per step, on all ranks. The passes, in order:
///
/// 1. data-parallel: finish_grad_sync() of every model.
/// 2. num_tokens: with per-token scaling, sums `num_tokens` over the data- and context-parallel
/// ranks
///    and divides all gradients by it, or by 1 if it is 0. The loss must be a sum over tokens, and
///    `num_tokens` the number of tokens that this rank summed over in all micro-batches of the
///    step.
///
/// `models` are the wrapped chunks of the model of this rank. `num_tokens` [1 element, any numeric
/// dtype] is needed with per-token scaling and refused without it.
///
/// UsageError: no model, models of different scaling, a step that is final already or whose last
/// backward is missing (naming the parameters), a missing, superfluous or negative num_tokens.
FinalizeReport finalize_model_grads(const std::vector<DistributedDataParallel*>& models,
                                    const std::optional<at::Tensor>& num_tokens = std::nullopt);

}  // namespace lockstep
