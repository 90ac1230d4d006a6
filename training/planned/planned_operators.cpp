#include "lockstep/training/planned_operators.h"

#include <tuple>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "lockstep/core/planned_cpu.h"
#include "lockstep/kernels/cross_entropy_operands.h"
#include "lockstep/kernels/dropout_operands.h"
#include "lockstep/kernels/fp8.h"
#include "lockstep/kernels/fp8_tensors.h"
#include "lockstep/kernels/norm_operands.h"
#include "lockstep/kernels/rotary_operands.h"
#include "lockstep/training/kernel_costs.h"
#include "lockstep/training/planned_host.h"

namespace lockstep {
namespace {

using at::Tensor;

void host_waits() {
  if (PlannedHost* const host = PlannedHost::current())
    host->wait_for_stream(host->stream_position());
}

Tensor& copy(Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_meta()) return to;
  if (const PlannedHost* const host = PlannedHost::current())
    host->read(from, to);
  else
    to.zero_();
  if (!non_blocking) host_waits();
  return to;
}

at::Scalar local_scalar(const Tensor& from) {
  Tensor to = at::zeros({}, at::TensorOptions(at::kCPU).dtype(from.scalar_type()));
  copy(to, from, /*non_blocking=*/false);
  return to.item();
}

std::vector<int64_t> sizes_with(const Tensor& like, int64_t dim, int64_t size) {
  std::vector<int64_t> sizes = like.sizes().vec();
  sizes[static_cast<size_t>(dim < 0 ? dim + like.dim() : dim)] = size;
  return sizes;
}

Tensor index_select(const Tensor& from, int64_t dim, const Tensor& index) {
  return at::empty(sizes_with(from, dim, index.numel()), from.options());
}

Tensor embedding_gradient(const Tensor& grad, const Tensor& /*indices*/, c10::SymInt rows,
                          c10::SymInt /*padding*/, bool /*scale*/) {
  return at::empty({rows.expect_int(), grad.size(-1)}, grad.options());
}

Tensor search_sorted(const Tensor& /*sorted*/, const Tensor& values, bool int32, bool /*right*/,
                     std::optional<std::string_view> /*side*/,
                     const std::optional<Tensor>& /*sorter*/) {
  return at::empty(values.sizes(), values.options().dtype(int32 ? at::kInt : at::kLong));
}

Tensor where(const Tensor& condition, const Tensor& a, const Tensor& b) {
  const auto sizes = at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes());
  return at::empty(sizes, at::TensorOptions(c10::DeviceType::Meta).dtype(at::result_type(a, b)));
}

Tensor& where_out(const Tensor& condition, const Tensor& a, const Tensor& b, Tensor& out) {
  out.resize_(at::infer_size(at::infer_size(condition.sizes(), a.sizes()), b.sizes()));
  return out;
}

Tensor& index_select_out(const Tensor& from, int64_t dim, const Tensor& index, Tensor& out) {
  out.resize_(sizes_with(from, dim, index.numel()));
  return out;
}

Tensor& wide_product(const Tensor& /*sum*/, const Tensor& /*a*/, const Tensor& /*b*/,
                     at::ScalarType /*dtype*/, const at::Scalar& /*beta*/,
                     const at::Scalar& /*alpha*/, Tensor& out) {
  return out;
}

Tensor flip(const Tensor& from, at::IntArrayRef /*dims*/) {
  return at::empty(from.sizes(), from.options());
}

Tensor number_of_nonzeros(const Tensor& from, at::IntArrayRef /*dims*/) {
  return at::empty({}, from.options().dtype(at::kLong));
}

/// Gradients of 16 bits.
void unscale(at::TensorList tensors, Tensor& /*found*/, const Tensor& /*factor*/) {
  for (const Tensor& tensor : tensors) note_kernel("unscale", {tensor, tensor});
}

Tensor extreme(const Tensor& from) { return at::empty({}, from.options()); }

Tensor& like_input(const Tensor& from, Tensor& out) {
  out.resize_(from.sizes());
  return out;
}

Tensor& like_both(const Tensor& a, const Tensor& b, Tensor& out) {
  out.resize_(at::infer_size(a.sizes(), b.sizes()));
  return out;
}

Tensor& like_any(const Tensor& from, std::optional<double> /*nan*/, std::optional<double> /*most*/,
                 std::optional<double> /*least*/, Tensor& out) {
  out.resize_(from.sizes());
  return out;
}

Tensor floor_divided(const Tensor& a, const Tensor& b) {
  return at::empty(at::infer_size(a.sizes(), b.sizes()),
                   at::TensorOptions(c10::DeviceType::Meta).dtype(at::result_type(a, b)));
}

/// [batch, heads, sequence] of fp32, or fp64.
Tensor log_sums(const Tensor& query) {
  const auto wide = query.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::empty({query.size(0), query.size(1), query.size(2)}, query.options().dtype(wide));
}

/// [batch, heads, sequence, channels], laid out as by the kernels: on the CPU with the heads next
/// to the channels, on CUDA like `from`.
Tensor like_heads(const Tensor& from, int64_t channels) {
  if (!plans_cpu() && channels == from.size(-1)) return at::empty_like(from);
  return at::empty({from.size(0), from.size(2), from.size(1), channels}, from.options())
      .transpose(1, 2);
}
Tensor like_heads(const Tensor& from) { return like_heads(from, from.size(-1)); }

using FlashResult =
    std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor>;

FlashResult flash(const Tensor& query, const Tensor& key, const Tensor& value, double /*dropout*/,
                  bool /*causal*/, bool /*mask*/, std::optional<double> /*scale*/) {
  const Tensor seed = at::empty({2}, query.options().dtype(at::kUInt64));
  return {like_heads(query, value.size(-1)),
          log_sums(query),
          Tensor(),
          Tensor(),
          query.size(2),
          key.size(2),
          seed,
          at::empty({}, seed.options()),
          at::empty({0}, query.options())};
}

std::tuple<Tensor, Tensor, Tensor> flash_backward(
    const Tensor& /*grad*/, const Tensor& query, const Tensor& key, const Tensor& value,
    const Tensor& /*out*/, const Tensor& /*sums*/, const Tensor& /*cum_q*/, const Tensor& /*cum_k*/,
    c10::SymInt /*max_q*/, c10::SymInt /*max_k*/, double /*dropout*/, bool /*causal*/,
    const Tensor& /*seed*/, const Tensor& /*offset*/, std::optional<double> /*scale*/) {
  // With grouped queries the kernel makes gradients for each query head before it adds them up.
  Tensor of_keys, of_values;
  if (key.size(1) != query.size(1)) {
    of_keys = at::empty({key.size(0), key.size(2), query.size(1), key.size(3)}, key.options());
    of_values =
        at::empty({value.size(0), value.size(2), query.size(1), value.size(3)}, value.options());
  }
  return {like_heads(query), like_heads(key), like_heads(value)};
}

std::tuple<Tensor, Tensor> cpu_flash(const Tensor& query, const Tensor& /*key*/,
                                     const Tensor& value, double /*dropout*/, bool /*causal*/,
                                     const std::optional<Tensor>& /*mask*/,
                                     std::optional<double> /*scale*/) {
  return {like_heads(query, value.size(-1)), log_sums(query)};
}

std::tuple<Tensor, Tensor, Tensor> cpu_flash_backward(const Tensor& /*grad*/, const Tensor& query,
                                                      const Tensor& key, const Tensor& value,
                                                      const Tensor& /*out*/, const Tensor& /*sums*/,
                                                      double /*dropout*/, bool /*causal*/,
                                                      const std::optional<Tensor>& /*mask*/,
                                                      std::optional<double> /*scale*/) {
  return {like_heads(query), like_heads(key), like_heads(value)};
}

/// Chooses as CUDA and the CPU do; the meta device would take separate operations.
Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value,
                 const std::optional<Tensor>& mask, double dropout, bool causal,
                 std::optional<double> scale, bool grouped) {
  if ((mask && mask->defined()) || dropout > 0)
    return std::get<0>(at::_scaled_dot_product_attention_math(
        query, key, value, mask, dropout, causal, /*dropout_mask=*/std::nullopt, scale, grouped));
  return std::get<0>(at::_scaled_dot_product_flash_attention(query, key, value, dropout, causal,
                                                             /*return_debug_mask=*/false, scale));
}

Tensor squares(const Tensor& flat) {
  Tensor sum = at::empty({}, flat.options().dtype(at::kDouble));
  note_kernel("sum_of_squares", {flat, sum});
  return sum;
}

Tensor fingerprint(const Tensor& bytes) {
  Tensor sum = at::empty({}, bytes.options().dtype(at::kLong));
  note_kernel("fingerprint", {bytes, sum});
  return sum;
}

/// Notes a pass over segments of flat tensors, some of which may be undefined.
void note_update(const char* name, const kernels::UpdateSegments& segments,
                 std::initializer_list<Tensor> whole) {
  int64_t elements = 0;
  for (const kernels::UpdateSegment& segment : segments) elements += segment.end - segment.start;
  std::vector<Tensor> parts;
  for (const Tensor& tensor : whole)
    if (tensor.defined()) parts.push_back(tensor.slice(0, 0, elements));
  note_kernel(name, parts);
}

/// Notes a product of `x` with matrices; each row is multiplied by one of them.
Tensor noted_product(const char* name, const Tensor& x, const Tensor& other, Tensor result) {
  const double flops = 2 * static_cast<double>(x.numel()) * static_cast<double>(result.size(-1));
  note_kernel(name, {x, other, result}, flops);
  return result;
}

Tensor rows_of_groups(const Tensor& x, const Tensor& matrices, const Tensor& /*ends*/) {
  return noted_product("grouped_rows", x, matrices,
                       at::empty({x.size(0), matrices.size(2)}, x.options()));
}

Tensor matrices_of_groups(const Tensor& a, const Tensor& b, const Tensor& ends) {
  return noted_product("grouped_matrices", a, b,
                       at::empty({ends.size(0), a.size(1), b.size(1)}, a.options()));
}

Tensor sums_of_groups(const Tensor& x, const Tensor& /*none*/, const Tensor& ends) {
  Tensor sums = at::empty({ends.size(0), x.size(1)}, x.options());
  note_kernel("grouped_sums", {x, sums});
  return sums;
}

}  // namespace

std::vector<torch::Library> planned_operators() {
  std::vector<torch::Library> libraries;
  torch::Library& meta = libraries.emplace_back(torch::Library::IMPL, "aten",
                                                c10::DispatchKey::Meta, __FILE__, __LINE__);
  meta.impl("copy_", &copy);
  meta.impl("_local_scalar_dense", &local_scalar);
  meta.impl("index_select", &index_select);
  meta.impl("embedding_dense_backward", &embedding_gradient);
  meta.impl("searchsorted.Tensor", &search_sorted);
  meta.impl("where.self", &where);
  meta.impl("where.self_out", &where_out);
  meta.impl("index_select.out", &index_select_out);
  meta.impl("floor_divide.out", &like_both);
  meta.impl("flip", &flip);
  meta.impl("count_nonzero.dim_IntList", &number_of_nonzeros);
  meta.impl("_amp_foreach_non_finite_check_and_unscale_", &unscale);
  meta.impl("max", &extreme);
  meta.impl("min", &extreme);
  meta.impl("logical_not.out", &like_input);
  meta.impl("abs.out", &like_input);
  meta.impl("logical_and.out", &like_both);
  meta.impl("logical_or.out", &like_both);
  meta.impl("nan_to_num.out", &like_any);
  meta.impl("floor_divide", &floor_divided);
  meta.impl("addmm.dtype_out", &wide_product);
  meta.impl("_scaled_dot_product_flash_attention", &flash);
  meta.impl("_scaled_dot_product_flash_attention_backward", &flash_backward);
  meta.impl("_scaled_dot_product_flash_attention_for_cpu", &cpu_flash);
  meta.impl("_scaled_dot_product_flash_attention_for_cpu_backward", &cpu_flash_backward);
  // Overrides operators that autograd knows.
  torch::Library& autograd = libraries.emplace_back(
      torch::Library::IMPL, "aten", c10::DispatchKey::AutogradMeta, __FILE__, __LINE__);
  autograd.impl("scaled_dot_product_attention", &attention);
  return libraries;
}

kernels::DeviceKernels planned_kernels() {
  static_assert(sizeof(kernels::DeviceKernels) == 18 * sizeof(void (*)()),
                "a new kernel needs a line here");
  using kernels::UpdateSegments;
  kernels::DeviceKernels none;
  // A kernel that changes a tensor reads and writes it.
  none.adamw = [](const Tensor& master, const Tensor& grad, const Tensor& exp_avg,
                  const Tensor& exp_avg_sq, const Tensor& low_precision,
                  const UpdateSegments& segments, const kernels::AdamWScalars&,
                  const kernels::StepControl&) {
    note_update("adamw", segments,
                {master, master, grad, exp_avg, exp_avg, exp_avg_sq, exp_avg_sq, low_precision});
  };
  none.sgd = [](const Tensor& master, const Tensor& grad, const Tensor& momentum,
                const Tensor& low_precision, const UpdateSegments& segments,
                const kernels::SgdScalars&, const kernels::StepControl&) {
    note_update("sgd", segments, {master, master, grad, momentum, momentum, low_precision});
  };
  none.sum_of_squares = &squares;
  none.fingerprint = &fingerprint;
  none.grouped_rows = &rows_of_groups;
  none.grouped_matrices = &matrices_of_groups;
  none.grouped_sums = &sums_of_groups;
  none.cross_entropy = [](const kernels::CrossEntropyTensors& t) {
    note_kernel("cross_entropy", {t.logits, t.labels, t.sums.highest, t.sums.sums});
  };
  none.cross_entropy_losses = [](const kernels::CrossEntropyTensors& t) {
    note_kernel("cross_entropy_losses", {t.labels, t.sums.highest, t.sums.sums, t.losses});
  };
  none.cross_entropy_gradient = [](const kernels::CrossEntropyTensors& t) {
    note_kernel("cross_entropy_gradient",
                {t.logits, t.labels, t.sums.highest, t.sums.sums, t.grads, t.result});
  };
  none.dropout = [](const kernels::DropoutTensors& t) {
    note_kernel("dropout", {t.x, t.residual, t.result});
  };
  none.to_fp8 = [](const kernels::Fp8Tensors& t) {
    note_kernel("to_fp8", {t.x, t.scale, t.values, t.transposed});
  };
  none.scaled_mm = [](const kernels::Fp8Matrix& a, const kernels::Fp8Matrix& b,
                      const std::optional<Tensor>&, at::ScalarType dtype, bool) {
    return noted_product(
        "scaled_mm", a.values, b.values,
        at::empty({a.values.size(0), b.values.size(0)}, a.values.options().dtype(dtype)));
  };
  none.norm = [](const kernels::NormTensors& t) {
    note_kernel("norm", {t.x, t.residual, t.weight, t.bias, t.sum, t.normalized, t.mean, t.root});
  };
  none.norm_gradient = [](const kernels::NormGradientTensors& t) {
    note_kernel("norm_gradient", {t.grad, t.sum_grad, t.source, t.mean, t.root, t.weight,
                                  t.input_grad, t.weight_parts, t.bias_parts});
  };
  none.rotary = [](const kernels::RotaryTensors& t) {
    note_kernel("rotary", {t.packed, t.heads.query, t.heads.key, t.heads.value});
  };
  none.swiglu = [](const Tensor& inner, const Tensor& result) {
    note_kernel("swiglu", {inner, result});
  };
  none.swiglu_gradient = [](const Tensor& grad, const Tensor& inner, const Tensor& of_inner) {
    note_kernel("swiglu_gradient", {grad, inner, of_inner});
  };
  return none;
}

}  // namespace lockstep
