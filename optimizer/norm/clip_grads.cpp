#include "lockstep/optimizer/clip_grads.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/optimizer/clip_formula.h"
#include "lockstep/optimizer/counted_grads.h"
#include "lockstep/optimizer/norms.h"

namespace lockstep {
namespace {

using Models = std::vector<DistributedDataParallel*>;

/// For each class: 0, or infinity if this rank's copy of a gradient that another rank counts is not
/// finite, so that no rank steps. Undefined if there is no such gradient.
std::vector<at::Tensor> infinite_elsewhere(const CountedRanges& counted) {
  std::vector<at::Tensor> result;
  for (const std::vector<at::Tensor>& pieces : counted.grads_counted_elsewhere()) {
    at::Tensor marks;
    for (const at::Tensor& piece : pieces)
      marks = marks.defined() ? marks + finite_mark(piece) : finite_mark(piece);
    if (marks.defined())
      marks =
          at::where(marks.isfinite(), 0., std::numeric_limits<double>::infinity()).to(at::kDouble);
    result.push_back(marks);
  }
  return result;
}

}  // namespace

at::Tensor grad_norm(const CountedRanges& counted, double norm_type) {
  const at::NoGradGuard no_grad;
  const Models& models = counted.models();
  const ParallelState& state = models.front()->parallel_state();
  const PieceClasses pieces = notify_on_error(state, [&] { return counted.grads("grad_norm"); });
  const std::vector<at::Tensor> elsewhere = infinite_elsewhere(counted);
  const CombineClasses combine = [&](std::vector<at::Tensor> of_class, ReduceOp op,
                                     const char* label) {
    for (size_t i = 0; i < of_class.size(); ++i)
      if (elsewhere[i].defined()) of_class[i] = of_class[i] + elsewhere[i];
    return combine_over_model(models, of_class, op, label);
  };
  const at::Tensor norm = norm_of_pieces(pieces, norm_type, state.device(), combine);
  if (norm_type != 2 || !norm.is_cpu() || !std::isinf(norm.item<double>())) return norm;
  return scaled_norm_of_pieces(pieces, norm_type, state.device(), combine);
}

at::Tensor grad_norm(const Models& models, double norm_type) {
  check_model_list(models, "grad_norm");
  notify_on_error(models.front()->parallel_state(), [&] {
    require<UsageError>(norm_type >= 1, "grad_norm: norm_type: found {}, allowed: >= 1", norm_type);
  });
  return grad_norm(CountedRanges(models, Gaps::included, "grad_norm"), norm_type);
}

double clip_coefficient(double norm, double max_norm) {
  return max_norm > 0 ? clip_factor(norm, max_norm) : 1;
}

double clip_grad_norm_(const Models& models, double max_norm, double norm_type) {
  check_model_list(models, "clip_grad_norm_");
  notify_on_error(models.front()->parallel_state(), [&] {
    require<UsageError>(std::isfinite(max_norm) && max_norm > 0,
                        "clip_grad_norm_: max_norm: found {}, allowed: > 0", max_norm);
  });
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
  return count_zeros(CountedRanges(models, Gaps::excluded_with_padding, "count_zeros"));
}

at::Tensor count_zeros(const CountedRanges& counted) {
  const at::NoGradGuard no_grad;
  const ParallelState& state = counted.models().front()->parallel_state();
  const PieceClasses classes = notify_on_error(state, [&] { return counted.grads("count_zeros"); });
  std::vector<at::Tensor> of_class;
  for (const std::vector<at::Tensor>& pieces : classes) {
    of_class.push_back(at::zeros({}, at::TensorOptions(state.device()).dtype(at::kLong)));
    for (const at::Tensor& piece : pieces)
      of_class.back() += piece.numel() - at::count_nonzero(piece);
  }
  return combine_over_model(counted.models(), of_class, ReduceOp::sum, "zeros in gradients");
}

}  // namespace lockstep
