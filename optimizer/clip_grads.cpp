#include "lockstep/optimizer/clip_grads.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/counted_grads.h"

namespace lockstep {
namespace {

using Models = std::vector<DistributedDataParallel*>;

/// The sum over pieces of of_piece(piece), a 0-dim tensor of `dtype`.
template <class OfPiece>
at::Tensor sum_of_pieces(const std::vector<at::Tensor>& pieces, c10::Device device,
                         at::ScalarType dtype, OfPiece of_piece) {
  at::Tensor total = at::zeros({}, at::TensorOptions(device).dtype(dtype));
  for (const at::Tensor& piece : pieces) total += of_piece(piece);
  return total;
}

/// sum_of_pieces() over all ranks.
template <class OfPiece>
at::Tensor sum_over_model(const Models& models, const GradPieces& pieces, at::ScalarType dtype,
                          const char* label, OfPiece of_piece) {
  const c10::Device device = models.front()->parallel_state().device();
  return combine_over_model(models, sum_of_pieces(pieces.dense, device, dtype, of_piece),
                            sum_of_pieces(pieces.expert, device, dtype, of_piece), ReduceOp::sum,
                            label);
}

/// The largest absolute value; NaN counts as infinity, because a maximum over ranks may lose a NaN.
at::Tensor largest(const std::vector<at::Tensor>& pieces, c10::Device device) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  at::Tensor most = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  for (const at::Tensor& piece : pieces)
    most = at::maximum(most, at::linalg_vector_norm(piece, kInfinity).to(at::kDouble));
  return at::nan_to_num(most, kInfinity, kInfinity);
}

at::Tensor infinity_norm(const Models& models, const GradPieces& pieces) {
  const c10::Device device = models.front()->parallel_state().device();
  return combine_over_model(models, largest(pieces.dense, device), largest(pieces.expert, device),
                            ReduceOp::max, "largest gradient");
}

at::Tensor power_norm(const Models& models, const GradPieces& pieces, double p) {
  const at::Tensor most = infinity_norm(models, pieces);
  const at::Tensor unit = at::where(most.gt(0).logical_and(most.isfinite()), most, 1.0);
  const auto powers = [&](const at::Tensor& piece) {
    at::Tensor total = at::zeros_like(most);
    for (const at::Tensor& part : cache_sized_parts(piece))
      total += part.to(at::kDouble).abs().div_(unit).pow_(p).sum();
    return total;
  };
  return unit * sum_over_model(models, pieces, at::kDouble, "gradient norm", powers).pow(1 / p);
}

}  // namespace

at::Tensor grad_norm(const Models& models, double norm_type) {
  require<UsageError>(norm_type >= 1, "grad_norm: norm_type: found {}, allowed: >= 1", norm_type);
  const at::NoGradGuard no_grad;
  const GradPieces pieces = counted_grads(models, Gaps::included, "grad_norm");
  if (std::isinf(norm_type)) return infinity_norm(models, pieces);
  if (norm_type == 2)
    return sum_over_model(models, pieces, at::kDouble, "gradient norm", sum_of_squares).sqrt();
  return power_norm(models, pieces, norm_type);
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
  return sum_over_model(
      models, pieces, at::kLong, "zeros in gradients",
      [](const at::Tensor& piece) { return at::count_nonzero(piece).neg_().add_(piece.numel()); });
}

}  // namespace lockstep
