#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/router_bias.h"
#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep {

/// What finalize_model_grads() did, as data; to_string() turns it into text. The groups in it are
/// handles, which keep the job's groups alive like any other handle.
struct FinalizeReport {
  /// One collective. Groups of one rank communicate nothing and have no entry, except in the passes
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

/// "tied gradients: all-reduce sum over embedding [0, 3], 96 bytes, 1 parameters"
std::string to_string(const FinalizeReport::Entry& entry);

/// One line per collective.
std::string to_string(const FinalizeReport& report);

/// Makes the gradients of a step final. Call it once per step, on all ranks, after the last
/// backward and before clipping or the optimizer. It waits for the data-parallel reduction and then
/// runs its passes, in the order of FinalizeReport::entries. The passes depend only on the
/// descriptions of the parameters (ParamDescription).
///
/// - A gradient that is partial over another axis (tp, pp; for experts etp, ep, pp) is reduced over
///   that axis. The ranks of the axis may also hold any other parameters. Pipeline stages must
///   register such parameters in the same order, under the same names. If names, order or shapes
///   differ between stages, for these or for tied copies, the constructor of Optimizer reports it
///   at once. Without an Optimizer the CPU's collectives fail at the timeout and name the
///   difference, but NCCL's compare nothing.
/// - All copies of a tied parameter get the sum of their gradients. Only the ranks that hold a copy
///   take part, and all of them must (see Tie).
/// - With per-token scaling all gradients are divided by the sum of `num_tokens` over the data- and
///   context-parallel ranks, or by 1 if the sum is less than 1. The loss must be a sum over tokens,
///   and `num_tokens` the number of tokens that this rank summed over in all micro-batches of the
///   step. With a pipeline only the number of the last stage is used; the other stages may omit it.
///   Tensor-parallel ranks must pass the same number. They do not compare it: if it differs, their
///   parameters drift apart.
/// - With the distributed optimizer all passes work on the shard that this rank owns, so they send
///   1 / shards of the bytes.
///
/// `models` are the wrapped model chunks of this rank. `num_tokens` [1 element, any numeric dtype]
/// is required with per-token scaling and refused without it. `router_biases` are those of the
/// routers that are being trained, in the same order on all ranks: for a GPTModel or MoELayers what
/// the function of that name in models/router_step.h returns.
///
/// UsageError, and CommunicationError on the other ranks: models of different scaling; a step that
/// is already final, or whose last backward is missing (naming the parameters); a missing,
/// superfluous or negative num_tokens; a tied parameter on a stage that cannot hold it; tied copies
/// of different shapes; a router bias that does not match its counters. UsageError on this rank
/// only: no model, or a model that is listed twice.
FinalizeReport finalize_model_grads(const std::vector<DistributedDataParallel*>& models,
                                    const std::optional<at::Tensor>& num_tokens = std::nullopt,
                                    const std::vector<RouterBias>& router_biases = {});

}  // namespace lockstep
