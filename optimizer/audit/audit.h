#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <torch/nn/module.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/optimizer/optimizer.h"

namespace lockstep {

/// What is audited: the chunks of this rank that have parameters, and the settings they were
/// created with.
struct AuditedModel {
  std::vector<DistributedDataParallel*> models;
  /// The module that each of `models` wraps. Only expected_audit() uses it.
  std::vector<const torch::nn::Module*> modules = {};
  DistributedDataParallelConfig ddp = {};
  const Optimizer* optimizer = nullptr;  ///< null: updates are not reported
  OptimizerConfig config = {};           ///< of the optimizer
  std::vector<ParamOverride> overrides = {};
  const UpdateStatement* own_rule = nullptr;
  /// If the loop uses set_num_microbatches(): the number of backwards per step, which audit() sets.
  /// It then measures twice: with buckets launched by hooks inside the last backward, and with
  /// buckets launched by start_grad_sync(). 0: the loop uses no_sync(); audit() runs one backward
  /// inside it, then start_grad_sync().
  int64_t num_microbatches = 0;
  /// How the loop turns the losses of a micro-batch's tokens [micro-batch, sequence] into the loss
  /// for backward, without the loss scale; needs num_microbatches. Unset: their sum or, if
  /// gradients are averaged, their mean / num_microbatches.
  std::function<at::Tensor(const at::Tensor& losses)> loss = {};
  /// What the loop runs between the last backward and the optimizer. It must pass `num_tokens` on,
  /// which is unset without per-token scaling. Empty: finalize_model_grads().
  std::function<void(const std::optional<at::Tensor>& num_tokens)> finalize = {};
};

/// Measures what happens to each gradient. It sends integers in place of gradients through the
/// step's own buckets, collectives and passes of finalize_model_grads(). The results show which
/// ranks' terms reached which rank, with which factor, and whose tokens divided them. It needs no
/// values of a model and no reference:
///
///     const AuditedModel model = {.models = {&ddp}, .modules = {&module},
///                                 .optimizer = &optimizer, .config = config};
///     const auto lines = audit_differences(expected_audit(model), audit(model));
///     // none: the step does with each gradient what the parameter's description says
///
/// Each rank's local gradient is a multiple of 48 that is specific to the parameter, times a power
/// of 2^14 that is specific to the rank, so factors that are multiples of 1/48 can be read exactly.
/// As many ranks share a round as fit into the dtype of the gradients: 4 in fp64, 2 in fp32, 1 in
/// 16 bits; if gradients are averaged, 3 in fp64, else 1. The tokens take one round for every 40
/// ranks in fp64, 16 in fp32, 4 in 16 bits. A round costs as much as the gradient reduction of a
/// step, without forward. Steps without an audit cost nothing extra.
///
/// Then all gradients are set to 1, and grad_norm() shows how many elements it counts; with
/// gradients of 0, count_zeros() shows how many it counts, to which rows of padding are added. The
/// update's factor, which removes the loss scale and clips, is measured with given numbers in place
/// of the norm. What a loop does before `loss`, or in the update itself, is not measured.
///
/// Collective over all ranks, between two steps (state idle or ready), not after
/// set_force_all_reduce(true). With ddp.check_for_large_grads the integers, up to 2^52, count as
/// large. Weights, optimizer state and router biases do not change. Afterwards gradients are zero
/// and the state is idle, as after zero_grad_buffer(). The report is the same on all ranks.
/// UsageError: no model, a step that is in progress, a loss without num_microbatches, gradients
/// that model.finalize left unfinished, and those of finalize_model_grads().
AuditReport audit(const AuditedModel& model);

/// What audit() must measure according to the parameters' descriptions. Collective over all ranks;
/// gradients are not touched. All chunks except the first one of the first stage are assumed to be
/// created with disable_bucketing. UsageError: modules that do not match models, or a parameter
/// that is tied to stages that do not include the rank's stage.
AuditReport expected_audit(const AuditedModel& model);

}  // namespace lockstep
