#include "lockstep/kernels/norm.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/integers.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/layer_kernels.h"
#include "lockstep/kernels/norm_loop.h"
#include "lockstep/kernels/norm_operands.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kElementsOfThread = 1 << 15;
constexpr int64_t kMostParts = 512, kLeastRowsOfPart = 16;

/// `x` itself if it is contiguous. A copy is detached: recomputation would take a tensor made
/// without a graph for a leaf.
at::Tensor contiguous(const at::Tensor& x) {
  return !x.defined() || x.is_contiguous() ? x : x.detach().contiguous();
}

/// Not empty_like(), an operator that would show `x` to recomputation.
at::Tensor empty_as(const at::Tensor& x) { return at::empty(x.sizes(), x.options()); }

/// The sum over the rows of `parts`, which it may overwrite. Small ones on the host without an
/// operator, whose call takes longer than the sum.
at::Tensor sum_of_parts(const at::Tensor& parts) {
  if (!parts.defined()) return parts;
  if (!parts.is_cpu() || parts.size(0) == 0 || parts.numel() > kElementsOfThread)
    return parts.sum(0);
  at::Tensor total = at::empty({parts.size(1)}, parts.options());
  const auto sum = [&](auto element) {
    using W = decltype(element);
    sum_rows(elements<W>(parts), parts.size(0), parts.size(1), elements<W>(total));
  };
  parts.scalar_type() == at::kDouble ? sum(double()) : sum(float());
  return total;
}

}  // namespace

void norm_cpu(const NormTensors& t) {
  for_storage("norm", t.x.scalar_type(), [&](auto element) {
    const auto rows = t.rows<decltype(element)>();
    const int64_t grain =
        std::max<int64_t>(1, kElementsOfThread / std::max<int64_t>(1, rows.width));
    parallel_for(0, t.num_rows(), grain,
                 [&](int64_t first, int64_t end) { norm_loop(t.centred(), rows, first, end); });
  });
}

void norm_gradient_cpu(const NormGradientTensors& t) {
  for_storage("norm", t.source.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const auto rows = t.rows<T>();
    auto *const of_weight = elements<Wide<T>>(t.weight_parts), *const of_bias =
                                                                   elements<Wide<T>>(t.bias_parts);
    const int64_t a_part = std::max<int64_t>(1, t.rows_a_part * rows.width);
    const int64_t grain = std::max<int64_t>(1, kElementsOfThread / a_part);
    parallel_for(0, t.num_parts, grain, [&](int64_t begin, int64_t stop) {
      for (int64_t part = begin; part < stop; ++part)
        norm_gradient_loop(t.centred(), rows, part * t.rows_a_part,
                           std::min(t.num_rows(), (part + 1) * t.rows_a_part),
                           of_weight ? of_weight + part * rows.width : nullptr,
                           of_bias ? of_bias + part * rows.width : nullptr);
    });
  });
}

NormResult norm_forward(NormKind kind, const at::Tensor& x, const at::Tensor& residual,
                        const at::Tensor& weight, const at::Tensor& bias, double epsilon) {
  // Even where to() changes nothing, it is an operator that recomputation sees.
  const at::ScalarType wide = wide_dtype(x.scalar_type());
  const at::Tensor wide_weight = weight.to(wide).contiguous();
  const bool centred = kind == NormKind::layer;
  const at::Tensor wide_bias = centred ? bias.to(wide).contiguous() : at::Tensor();
  NormTensors t;
  t.x = contiguous(x);
  t.residual = contiguous(residual);
  t.weight = wide_weight;
  t.bias = wide_bias;
  t.epsilon = epsilon;
  if (residual.defined()) t.sum = empty_as(t.x);
  t.normalized = empty_as(t.x);
  if (centred) t.mean = at::empty({t.num_rows()}, t.x.options().dtype(wide));
  t.root = at::empty({t.num_rows()}, t.x.options().dtype(wide));
  const c10::DeviceGuard guard(x.device());
  layer_kernels("norm", x).norm(t);
  return {residual.defined() ? t.sum : x, t.normalized, t.mean, t.root};
}

NormGradients norm_backward(NormKind kind, const at::Tensor& grad, const at::Tensor& sum_grad,
                            const NormResult& forward, const at::Tensor& weight,
                            bool of_parameters) {
  const at::Tensor& source = forward.sum;
  const at::ScalarType wide = wide_dtype(source.scalar_type());
  const at::Tensor wide_weight = weight.to(wide).contiguous();  // an operator gathers shards
  const int64_t width = weight.size(0);
  NormGradientTensors t;
  t.grad = contiguous(grad);
  t.sum_grad = contiguous(sum_grad);
  t.source = contiguous(source);
  t.mean = forward.mean;
  t.root = forward.root;
  t.weight = wide_weight;
  t.input_grad = empty_as(t.source);
  t.rows_a_part = std::max(kLeastRowsOfPart, ceil_div(t.num_rows(), kMostParts));
  t.num_parts = ceil_div(t.num_rows(), t.rows_a_part);
  const at::TensorOptions options = t.source.options().dtype(wide);
  if (of_parameters) t.weight_parts = at::empty({t.num_parts, width}, options);
  if (of_parameters && kind == NormKind::layer) t.bias_parts = at::empty_like(t.weight_parts);
  const c10::DeviceGuard guard(source.device());
  layer_kernels("norm", source).norm_gradient(t);
  return {t.input_grad, sum_of_parts(t.weight_parts), sum_of_parts(t.bias_parts)};
}

}  // namespace lockstep::kernels
