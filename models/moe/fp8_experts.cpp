#include "lockstep/models/fp8_experts.h"

#include <vector>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

at::Tensor padded_rows(const at::Tensor& x, int64_t first, int64_t count) {
  const at::Tensor rows = x.narrow(0, first, count);
  const int64_t over = count % kernels::kFp8Multiple;
  return over == 0 ? rows : at::constant_pad_nd(rows, {0, 0, 0, kernels::kFp8Multiple - over});
}

template <class Visit>
void for_idle_experts(const kernels::RowGroups& groups, Visit visit) {
  const std::vector<int64_t>& rows = groups.rows_on_host();
  for (size_t expert = 0; expert < rows.size(); ++expert)
    if (rows[expert] == 0) visit(static_cast<int64_t>(expert));
}

/// Without the padding.
void copy_rows(const at::Tensor& to, int64_t first, int64_t count, const at::Tensor& padded) {
  to.narrow(0, first, count).copy_(padded.narrow(0, 0, count));
}

}  // namespace

at::Tensor fp8_grouped_rows(const Fp8Layer& fp8, const at::Tensor& x, const at::Tensor& weight,
                            const kernels::RowGroups& groups, bool notes) {
  const at::Tensor output = at::empty({x.size(0), weight.size(1)}, x.options());
  kernels::for_groups(groups, [&](int64_t expert, int64_t first, int64_t count) {
    copy_rows(output, first, count,
              fp8.output(padded_rows(x, first, count), weight[expert], {}, notes));
  });
  if (notes) for_idle_experts(groups, [&](int64_t expert) { fp8.note_weight(weight[expert]); });
  return output;
}

GroupedGradients fp8_grouped_gradients(const Fp8Layer& fp8, const at::Tensor& grad,
                                       const at::Tensor& x, const at::Tensor& weight,
                                       const kernels::RowGroups& groups, WantedGradients wanted) {
  GroupedGradients result;
  if (wanted.of_input) result.of_input = at::empty({grad.size(0), weight.size(2)}, grad.options());
  if (wanted.of_weight) {
    result.of_weight = at::empty(weight.sizes(), weight.options());
    for_idle_experts(groups, [&](int64_t expert) { result.of_weight[expert].zero_(); });
  }
  kernels::for_groups(groups, [&](int64_t expert, int64_t first, int64_t count) {
    const kernels::Fp8Matrices narrowed =
        fp8.narrowed(padded_rows(grad, first, count), wanted.of_weight);
    if (wanted.of_input)
      copy_rows(result.of_input, first, count,
                fp8.input_gradient(narrowed, weight[expert], grad.scalar_type()));
    if (wanted.of_weight)
      result.of_weight[expert].copy_(
          fp8.weight_gradient(narrowed, padded_rows(x, first, count), weight.scalar_type()));
  });
  return result;
}

}  // namespace lockstep
