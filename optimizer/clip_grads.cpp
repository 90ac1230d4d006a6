#include "lockstep/optimizer/clip_grads.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/sum_of_squares.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

/// Whether this rank counts the parameter: on every axis that replicates it, the first rank does.
bool counts_here(const ParamDescription& description, const ParallelState& state) {
  const auto first_of = [&](GroupKind kind) { return state.group(kind).rank() == 0; };
  const MeshAxis axis = description.is_expert ? MeshAxis::etp : MeshAxis::tp;
  const GroupKind kind = description.is_expert ? GroupKind::expert_tp : GroupKind::tp;
  return std::holds_alternative<Shard>(description.placement(axis)) || first_of(kind);
}

/// Sum of the squares of a buffer's gradients that this rank counts. Neighbours are taken in one
/// piece; the gaps between them are zero.
at::Tensor counted_squares(const ParamAndGradBuffer& buffer, const ParallelState& state) {
  at::Tensor total = at::zeros({}, buffer.grad_data().options().dtype(at::kDouble));
  int64_t start = -1, end = -1;
  const auto add_piece = [&] {
    if (start >= 0) total += kernels::sum_of_squares(buffer.grad_data().slice(0, start, end));
    start = -1;
  };
  for (const ParamLayout::Bucket& bucket : buffer.layout().buckets)
    for (const int64_t index : bucket.params) {
      const auto& slot = buffer.layout().slots[static_cast<size_t>(index)];
      if (!counts_here(buffer.params()[static_cast<size_t>(index)].description, state)) {
        add_piece();
        continue;
      }
      if (start < 0) start = slot.start;
      end = slot.end;
    }
  add_piece();
  return total;
}

}  // namespace

at::Tensor grad_norm(const std::vector<DistributedDataParallel*>& models) {
  require<UsageError>(!models.empty(), "grad_norm: no model was given");
  const at::NoGradGuard no_grad;
  const ParallelState& state = models.front()->parallel_state();
  at::Tensor sums[2];  // dense, expert
  for (const DistributedDataParallel* model : models) {
    model->require_final_gradients("grad_norm");
    for (const auto& buffer : model->buffers()) {
      at::Tensor& sum = sums[buffer->params().front().description.is_expert];
      const at::Tensor squares = counted_squares(*buffer, state);
      sum = sum.defined() ? sum + squares : squares;
    }
  }
  at::Tensor total = at::zeros({}, at::TensorOptions(state.device()).dtype(at::kDouble));
  for (const bool expert : {false, true}) {
    if (!sums[expert].defined()) continue;
    all_reduce(state.group(expert ? GroupKind::tp_ep_pp : GroupKind::tp_pp), sums[expert],
               ReduceOp::sum, "gradient norm")
        .wait();
    total += sums[expert];
  }
  return total.sqrt();
}

double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return max_norm > 0 && coefficient < 1 ? coefficient : 1;
}

double clip_grad_norm_(const std::vector<DistributedDataParallel*>& models, double max_norm) {
  require<UsageError>(std::isfinite(max_norm) && max_norm > 0,
                      "clip_grad_norm_: max_norm: found {}, allowed: > 0", max_norm);
  const double norm = grad_norm(models).item<double>();
  const double coefficient = clip_coefficient(norm, max_norm);
  if (std::isfinite(norm) && coefficient < 1)
    for (DistributedDataParallel* model : models) model->scale_gradients(coefficient);
  return norm;
}

}  // namespace lockstep
