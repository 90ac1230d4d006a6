#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/gradient_synchronizer.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Your own training loop, whichever front reduces its gradients, if any: what it must provide so
/// that audit() can send integers through it in place of gradients.
///
///     const AuditedLoop loop = {
///         .parameters = collect_parameters(net), .state = &state, .num_microbatches = 2,
///         .step = [&](const AuditedLoop::Loss& loss, const auto&) {
///           sync.zero_grad();
///           for (int64_t m = 0; m < 2; ++m) (loss(m) / 2).backward();
///           sync.wait();
///         },
///         .norm = [&] { return clip_grad_norm_(net, state, std::nullopt); }};
///     const auto lines = audit_differences(expected_audit(loop), audit(loop));
struct AuditedLoop {
  /// The parameters of this rank with their descriptions: collect_parameters(module). Frozen ones
  /// are left out of the report.
  std::vector<NamedParameter> parameters;
  const ParallelState* state = nullptr;
  /// What the gradients are before the optimizer, over the ranks that split the batch.
  GradientReduction reduction = GradientReduction::mean;
  int64_t num_microbatches = 1;
  /// Takes the place of the model's loss [] of a micro-batch: a mean with GradientReduction::mean,
  /// else a sum over tokens. It uses every trained parameter of this rank.
  using Loss = std::function<at::Tensor(int64_t microbatch)>;
  /// One step of the loop up to the optimizer: sets the gradients to zero, runs backward of `loss`
  /// for each micro-batch (a loop of means divides it by the number of micro-batches), and reduces.
  /// `num_tokens` [] is this rank's number of tokens, set only with GradientReduction::per_token.
  std::function<void(const Loss& loss, const std::optional<at::Tensor>& num_tokens)> step;
  /// Computes the gradient norm of the whole model without changing anything; unset: the loop
  /// computes none.
  std::function<at::Tensor()> norm = {};
  /// Bytes per element that is sent, if narrower than the parameters: 2 with a hook that compresses
  /// to 16 bits.
  std::optional<int64_t> bytes_sent = {};
};

/// Like audit() of an AuditedModel, for what `step` leaves in param.grad(). The report does not
/// cover buckets, updates, or which rank counts what in the norm. Afterwards gradients are zero.
/// Other effects of `step` remain, such as a Reducer's number of iterations. Every rank must hold
/// its gradients unsharded. Collective over all ranks. UsageError: no state, no step, a
/// num_microbatches below 1, no trained parameter; and those of `step`.
AuditReport audit(const AuditedLoop& loop);

/// What audit() must measure according to the parameters' descriptions. Collective over all ranks.
/// UsageError as audit(), and for a parameter that is tied to stages that do not include the rank's
/// stage.
AuditReport expected_audit(const AuditedLoop& loop);

}  // namespace lockstep
