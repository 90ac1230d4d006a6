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

/// A loop of one's own, by whichever front it reduces its gradients, or by none: what it has to
/// give so that audit() can send integers through it in the place of gradients.
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
  /// Of this rank, with what they are described as: collect_parameters(module). Frozen ones are
  /// left out of the report.
  std::vector<NamedParameter> parameters;
  const ParallelState* state = nullptr;
  /// What the gradients are before the optimizer, over the ranks that split the batch.
  GradientReduction reduction = GradientReduction::mean;
  int64_t num_microbatches = 1;
  /// Stands for the model's loss [] of a micro-batch: a mean, with GradientReduction::mean, else a
  /// sum over tokens. Each trained parameter of this rank is used in it.
  using Loss = std::function<at::Tensor(int64_t microbatch)>;
  /// One step of the loop up to the optimizer: sets the gradients to zero, runs backward of `loss`
  /// of each micro-batch, which a loop of means divides by their number, and reduces. `num_tokens`
  /// [] are those of this rank, with GradientReduction::per_token only.
  std::function<void(const Loss& loss, const std::optional<at::Tensor>& num_tokens)> step;
  /// The gradient norm of the whole model, which changes nothing; unset: the loop has none.
  std::function<at::Tensor()> norm = {};
  /// Bytes of an element of what is sent, where that is narrower than the parameters: 2 under a
  /// hook that compresses to 16 bits.
  std::optional<int64_t> bytes_sent = {};
};

/// As audit() of an AuditedModel, of what `step` leaves in param.grad(). The report tells nothing
/// of buckets, updates and who counts what in the norm. Gradients are zero after it, and what
/// `step` otherwise changes has changed, such as the number of iterations of a Reducer. Every rank
/// must hold its gradients whole. Collective over all ranks. UsageError: no state, no step, a
/// num_microbatches below 1, no trained parameter; and those of `step`.
AuditReport audit(const AuditedLoop& loop);

/// What the descriptions of the parameters say that audit() must measure. Collective over all
/// ranks. UsageError as audit(), and for a parameter that is tied to stages that its rank is none
/// of.
AuditReport expected_audit(const AuditedLoop& loop);

}  // namespace lockstep
