#include "lockstep/training/batch_input.h"

#include <ATen/ATen.h>

#include "lockstep/core/upload.h"
#include "lockstep/datasets/token_batch.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/cross_entropy.h"

namespace lockstep {
namespace {

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
  const int64_t labels = counted * input.labels.size(1);
  return {std::move(input), labels};
}

}  // namespace

BatchInput make_batch_input(std::span<const int64_t> ids, std::span<const SampleMarks> marks,
                            int64_t seq_length, int64_t counted, const ParallelState& state) {
  if (!has_marks(marks)) return unmarked_input(ids, seq_length, counted, state);
  MarkedBatch batch = make_marked_batch(ids, marks, seq_length);
  batch.loss.slice(0, counted).fill_(false);
  const ProcessGroup cp = state.group(GroupKind::cp);
  const auto own = [&](const at::Tensor& x, int64_t dim) {
    return upload(cut_for_context(x, dim, cp).contiguous(), state.device());
  };
  const at::Tensor labels = batch.labels.masked_fill(batch.loss.logical_not(), kIgnoredLabel);
  GPTInput input = {.tokens = own(batch.tokens, 1), .labels = own(labels, 1)};
  if (batch.positions.defined()) input.positions.document_positions = own(batch.positions, 0);
  input.positions.documents = batch.documents;
  if (batch.padding.defined())
    input.positions.padding = {own(batch.padding, 0), batch.padding.sum().item<int64_t>()};
  const auto number = cut_for_context(batch.loss, 1, cp).sum().item<int64_t>();
  return {std::move(input), number};
}

}  // namespace lockstep
