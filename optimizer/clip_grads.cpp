#include "lockstep/optimizer/clip_grads.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/norms.h"

namespace lockstep {
namespace {

using Models = std::vector<DistributedDataParallel*>;

}  // namespace

at::Tensor grad_norm(const Models& models, double norm_type) {
  require<UsageError>(norm_type >= 1, "grad_norm: norm_type: found {}, allowed: >= 1", norm_type);
  const at::NoGradGuard no_grad;
  const GradPieces pieces = counted_grads(models, Gaps::included, "grad_norm");
  return norm_of_pieces(
      {pieces.dense, pieces.expert}, norm_type, models.front()->parallel_state().device(),
      [&](const std::vector<at::Tensor>& of_class, ReduceOp op, const char* label) {
        return combine_over_model(models, of_class[0], of_class[1], op, label);
      });
}

double clip_coefficient(double norm, double max_norm) {
  const double coefficient = max_norm / (norm + 1e-6);
  return max_norm > 0 && coefficient < 1 ? coefficient : 1;
}

double clip_grad_norm_(const Models& models, double max_norm, double norm_type) {
  require<UsageError>(std::isfinite(max_norm) && max_norm > 0,
                      "clip_grad_norm_: max_norm: found {}, allowed: > 0", max_norm);
  const double norm = grad_norm(models, norm_type).item<double>();
  const double coefficient = clip_coefficient(norm, max_norm);
  if (std::isfinite(norm) && coefficient < 1)
    for (DistributedDataParallel* model : models) model->scale_gradients(coefficient);
  return norm;
}

bool skips_step(double norm, const OptimizerConfig& config) {
  return !std::isfinite(norm) ||
         (config.grad_norm_skip_threshold && norm > *config.grad_norm_skip_threshold);
}

at::Tensor count_zeros(const Models& models) {
  const at::NoGradGuard no_grad;
  const GradPieces pieces = counted_grads(models, Gaps::excluded, "count_zeros");
  const c10::Device device = models.front()->parallel_state().device();
  const auto zeros_of = [&](const std::vector<at::Tensor>& list) {
    at::Tensor zeros = at::zeros({}, at::TensorOptions(device).dtype(at::kLong));
    for (const at::Tensor& piece : list) zeros += piece.numel() - at::count_nonzero(piece);
    return zeros;
  };
  return combine_over_model(models, zeros_of(pieces.dense), zeros_of(pieces.expert), ReduceOp::sum,
                            "zeros in gradients");
}

}  // namespace lockstep
