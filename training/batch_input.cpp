#include "lockstep/training/batch_input.h"

#include <ATen/ATen.h>

#include "lockstep/core/upload.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/cross_entropy.h"

namespace lockstep {
namespace {

at::Tensor own_part(const at::Tensor& x, int64_t dim, const ParallelState& state) {
  return upload(cut_for_context(x, dim, state.group(GroupKind::cp)).contiguous(), state.device());
}

/// The padding for the router, [sequence, samples] of bool on the host or undefined, and with it
/// the samples from `counted` on.
PaddingTokens with_filler(at::Tensor padding, const at::Tensor& labels, int64_t counted,
                          int64_t seq_length, const ParallelState& state) {
  const int64_t samples = labels.size(0);
  if (counted < samples) {
    if (!padding.defined()) padding = at::zeros({seq_length, samples}, at::kBool);
    padding.slice(1, counted).fill_(true);
  }
  if (!padding.defined()) return {};
  return {own_part(padding, 0, state), padding.sum().item<int64_t>()};
}

BatchInput unmarked_input(std::span<const int64_t> ids, int64_t seq_length, int64_t counted,
                          const ParallelState& state) {
  const TokenBatch batch = make_token_batch(ids, seq_length, state.device());
  const ProcessGroup cp = state.group(GroupKind::cp);
  GPTInput input = {.tokens = cut_for_context(batch.tokens, 1, cp),
                    .labels = cut_for_context(batch.labels, 1, cp)};
  if (counted < input.labels.size(0)) {
    input.labels = input.labels.clone();  // tokens share its memory
    input.labels.slice(0, counted).fill_(kIgnoredLabel);
  }
  input.positions.padding = with_filler({}, input.labels, counted, seq_length, state);
  const int64_t labels = counted * input.labels.size(1);
  return {std::move(input), labels};
}

}  // namespace

BatchInput make_batch_input(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                            int64_t seq_length, int64_t counted, const ParallelState& state) {
  if (!has_marks(marks)) return unmarked_input(ids, seq_length, counted, state);
  MarkedBatch batch = make_marked_batch(ids, marks, seq_length);
  batch.loss.slice(0, counted).fill_(false);
  const at::Tensor labels = batch.labels.masked_fill(batch.loss.logical_not(), kIgnoredLabel);
  GPTInput input = {.tokens = own_part(batch.tokens, 1, state),
                    .labels = own_part(labels, 1, state)};
  if (batch.positions.defined())
    input.positions.document_positions = own_part(batch.positions, 0, state);
  input.positions.documents = batch.documents;
  input.positions.padding = with_filler(batch.padding, labels, counted, seq_length, state);
  const auto number =
      cut_for_context(batch.loss, 1, state.group(GroupKind::cp)).sum().item<int64_t>();
  return {std::move(input), number};
}

}  // namespace lockstep
