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

at::Tensor grad_norm(const CountedRanges& counted, double norm_type) {
  const at::NoGradGuard no_grad;
  const Models& models = counted.models();
  return norm_of_pieces(
      counted.grads("grad_norm"), norm_type, models.front()->parallel_state().device(),
      [&](const std::vector<at::Tensor>& of_class, ReduceOp op, const char* label) {
        return combine_over_model(models, of_class, op, label);
      });
}

at::Tensor grad_norm(const Models& models, double norm_type) {
  require<UsageError>(norm_type >= 1, "grad_norm: norm_type: found {}, allowed: >= 1", norm_type);
  return grad_norm(CountedRanges(models, Gaps::included, "grad_norm"), norm_type);
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
  const CountedRanges counted(models, Gaps::excluded, "count_zeros");
  const c10::Device device = models.front()->parallel_state().device();
  std::vector<at::Tensor> of_class;
  for (const std::vector<at::Tensor>& pieces : counted.grads("count_zeros")) {
    of_class.push_back(at::zeros({}, at::TensorOptions(device).dtype(at::kLong)));
    for (const at::Tensor& piece : pieces)
      of_class.back() += piece.numel() - at::count_nonzero(piece);
  }
  return combine_over_model(models, of_class, ReduceOp::sum, "zeros in gradients");
}

}  // namespace lockstep
