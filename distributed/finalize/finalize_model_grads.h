#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// What finalize_model_grads did, as data; to_string() makes the text. The groups in it are
/// handles, which keep the job's groups like any other.
struct FinalizeReport {
  /// One collective. Groups of one rank send nothing and have none, except in the passes
  /// data-parallel and num_tokens.
  struct Entry {
    /// "data-parallel", "partial gradients", "tied gradients", ...; lives as long as the program
    std::string_view pass;
    ProcessGroup group;
    GradOperation operation;
    int64_t bytes = 0;  ///< contributed by this rank
    int64_t parameters = 0;
  };
  std::vector<Entry> entries;  ///< in the order of the passes

  /// Tokens of the global batch, at least 1 (0-dim, fp64, on the gradients' device). Undefined
  /// without per-token scaling.
  at::Tensor num_tokens;
};

/// The bias of one router of experts that is balanced without an auxiliary loss. It rises by its
/// rate where an expert got fewer tokens than the mean, and falls where it got more; the tokens are
/// those of all ranks of tp-dp-cp.
struct RouterBias {
  at::Tensor bias;               ///< [experts], the same on all ranks; is changed
  at::Tensor tokens_per_expert;  ///< [experts], tokens that this rank has routed; is set to zero
  double rate = 1e-3;            ///< by which an element of `bias` changes
};

/// "tied gradients: all-reduce sum over embedding [0, 3], 96 bytes, 1 parameters"
std::string to_string(const FinalizeReport::Entry& entry);

/// A line for each collective.
std::string to_string(const FinalizeReport& report);

/// Makes the gradients of a step final, between the last backward and clipping or the optimizer.
/// Call it once per step, on all ranks. It waits for the data-parallel reduction, then makes one
/// pass after another, in the order of FinalizeReport::entries. What they do follows from the
/// descriptions of the parameters (ParamDescription) alone.
///
/// - A gradient that is partial over another axis (tp, pp; for experts etp, ep, pp) is reduced over
///   it. The ranks of the axis may hold anything beside such parameters; stages of a pipeline
///   register theirs in the same order, under the same names. Where names, order or shapes differ
///   over stages, here or of tied copies, the constructor of an Optimizer says so at once. Without
///   one the CPU's collectives fail at the timeout, naming them, and NCCL's compare nothing.
/// - All copies of a tied parameter get the sum of their gradients. Only the ranks that hold a copy
///   take part, and all of them must (see Tie).
/// - With per-token scaling all gradients are divided by the sum of `num_tokens` over the data- and
///   context-parallel ranks, or by 1 if it is less. The loss must be a sum over tokens, and
///   `num_tokens` the number of tokens that this rank summed over in all micro-batches of the step.
///   With a pipeline the last stage's number counts, and the others may leave it out.
///   Tensor-parallel ranks give the same number: nothing is sent between them to compare it, and
///   where it differs their parameters drift apart.
/// - With the distributed optimizer all of this works on the shard that this rank owns, so it sends
///   1 / shards of the bytes.
///
/// `models` are the wrapped chunks of the model of this rank. `num_tokens` [1 element, any numeric
/// dtype] is needed with per-token scaling and refused without it. `router_biases` are those of the
/// routers that are being trained, in the same order on all ranks.
///
/// UsageError, of which the other ranks are told: models of different scaling, a step
/// that is final already or whose last backward is missing (naming the parameters), a missing,
/// superfluous or negative num_tokens, a tied parameter on a stage that cannot hold it, tied copies
/// of different shapes, a router bias that does not fit its counters. UsageError on this rank: no
/// model, or one that is listed twice.
FinalizeReport finalize_model_grads(const std::vector<DistributedDataParallel*>& models,
                                    const std::optional<at::Tensor>& num_tokens = std::nullopt,
                                    const std::vector<RouterBias>& router_biases = {});

}  // namespace lockstep
