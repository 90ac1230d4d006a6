#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// What is audited: the chunks of this rank that have parameters, and what they were made with.
struct AuditedModel {
  std::vector<DistributedDataParallel*> models;
  /// What each of `models` wraps. Only expected_audit() asks.
  std::vector<const torch::nn::Module*> modules = {};
  DistributedDataParallelConfig ddp = {};
  const Optimizer* optimizer = nullptr;  ///< null: nothing is told of updates
  OptimizerConfig config = {};           ///< of the optimizer
  std::vector<ParamOverride> overrides = {};
  const UpdateStatement* own_rule = nullptr;
  /// Backwards of a step that the loop counts by set_num_microbatches(); audit() sets them. Then
  /// buckets are launched by hooks inside the last backward, and once by start_grad_sync(). 0: the
  /// loop uses no_sync(); one backward inside it, then start_grad_sync().
  int64_t num_microbatches = 0;
  /// What the loop makes of the losses of a micro-batch's tokens [micro-batch, sequence] before
  /// backward, without loss scale; needs num_microbatches. Unset: their sum, or where gradients are
  /// averages their mean / num_microbatches.
  std::function<at::Tensor(const at::Tensor& losses)> loss = {};
  /// What stands between the last backward and the optimizer in the loop. `num_tokens` is to be
  /// handed on; unset without per-token scaling. Empty: finalize_model_grads().
  std::function<void(const std::optional<at::Tensor>& num_tokens)> finalize = {};
};

/// Measures what becomes of each gradient: sends integers through the step's own buckets,
/// collectives and passes of finalize_model_grads() in the place of gradients, and reads from what
/// comes back which ranks' terms reached which rank, with which factor, and whose tokens divided
/// them. No values of a model and no reference are needed:
///
///     const AuditedModel model = {.models = {&ddp}, .modules = {&module},
///                                 .optimizer = &optimizer, .config = config};
///     const auto lines = audit_differences(expected_audit(model), audit(model));
///     // none: the step does with each gradient what the parameter's description says
///
/// Each rank's local gradient is a multiple of 48 that is the parameter's own, times a power of
/// 2^14 that is the rank's own, so that factors that are multiples of 1/48 are read exactly. As
/// many ranks as fit the dtype of the gradients share a round: 4 in fp64, 2 in fp32, 1 in 16 bits;
/// where gradients are averages 3 in fp64, else 1. The tokens take a round for every 40 ranks in
/// fp64, 16 in fp32, 4 in 16 bits. A round costs what the reduction of a step costs, without
/// forward. A step without audit costs nothing more.
///
/// Then every gradient is 1, and grad_norm() tells how many elements it counts; of gradients that
/// are 0 count_zeros() does. The factor of the update, which takes the loss scale out and clips,
/// is measured with numbers in the place of the norm. What a loop does before `loss`, and in the
/// update itself, does not show.
///
/// Collective over all ranks, between two steps (state idle or ready), not after
/// set_force_all_reduce(true). With ddp.check_for_large_grads the markers, up to 2^52, count as
/// large. Weights, optimizer state and router biases stay as they are;
/// gradients are zero after it, and the state is idle, as after zero_grad_buffer(). The report is
/// the same on all ranks. UsageError: no model, a step that is under way, a loss without
/// num_microbatches, gradients that model.finalize left unfinished, and those of
/// finalize_model_grads().
AuditReport audit(const AuditedModel& model);

/// What the descriptions of the parameters say that audit() must measure. Collective over all
/// ranks; gradients are not touched. Chunks but the first one of the first stage are made with
/// disable_bucketing. UsageError: other modules than models, a parameter that is tied to stages
/// that its rank is none of.
AuditReport expected_audit(const AuditedModel& model);

}  // namespace lockstep
