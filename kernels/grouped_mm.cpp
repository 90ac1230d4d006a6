#include "lockstep/kernels/grouped_mm.h"

#include <utility>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/device_kernels.h"

namespace lockstep::kernels {
namespace {

/// The result of the kernel of x's device; undefined if it has none for the operands.
template <class Kernel>
at::Tensor in_one_launch(Kernel DeviceKernels::*kernel, const at::Tensor& x, const at::Tensor& y,
                         const RowGroups& groups) {
  if (x.is_cpu() || x.size(0) == 0) return {};
  const DeviceKernels* const found = find_device_kernels(x.device().type());
  if (!found || !(found->*kernel)) return {};
  const c10::DeviceGuard guard(x.device());
  return (found->*kernel)(x, y, groups.ends());
}

}  // namespace

RowGroups::RowGroups(at::Tensor ends, std::optional<std::vector<int64_t>> rows)
    : ends_(std::move(ends)), rows_(std::move(rows)) {
  require<UsageError>(ends_.dim() == 1 && ends_.scalar_type() == at::kInt &&
                          (!rows_ || static_cast<int64_t>(rows_->size()) == ends_.size(0)),
                      "RowGroups: found ends [{}] of {}, allowed: one Int a group",
                      fmt::join(ends_.sizes(), ", "), at::toString(ends_.scalar_type()));
}

const std::vector<int64_t>& RowGroups::rows_on_host() const {
  if (rows_) return *rows_;
  const at::Tensor host = ends_.cpu().contiguous();
  const auto* const end = host.const_data_ptr<int32_t>();
  std::vector<int64_t> rows(static_cast<size_t>(host.numel()));
  for (size_t group = 0; group < rows.size(); ++group)
    rows[group] = end[group] - (group > 0 ? end[group - 1] : 0);
  return rows_.emplace(std::move(rows));
}

at::Tensor grouped_rows(const at::Tensor& x, const at::Tensor& matrices, const RowGroups& groups) {
  const at::Tensor launched = in_one_launch(&DeviceKernels::grouped_rows, x, matrices, groups);
  if (launched.defined()) return launched;
  at::Tensor output = at::empty({x.size(0), matrices.size(2)}, x.options());
  for_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    at::Tensor part = output.narrow(0, first, count);
    at::mm_out(part, x.narrow(0, first, count), matrices[group]);
  });
  return output;
}

at::Tensor grouped_matrices(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups) {
  const at::Tensor launched = in_one_launch(&DeviceKernels::grouped_matrices, a, b, groups);
  if (launched.defined()) return launched;
  const at::Tensor output = at::zeros({groups.size(), a.size(1), b.size(1)}, a.options());
  for_groups(groups, [&](int64_t group, int64_t first, int64_t count) {
    at::Tensor matrix = output[group];
    at::mm_out(matrix, a.narrow(0, first, count).t(), b.narrow(0, first, count));
  });
  return output;
}

at::Tensor grouped_sums(const at::Tensor& x, const RowGroups& groups) {
  const at::Tensor launched = in_one_launch(&DeviceKernels::grouped_sums, x, {}, groups);
  if (launched.defined()) return launched;
  if (x.size(0) == 0) return at::zeros({groups.size(), x.size(1)}, x.options());
  return at::zeros({groups.size() + 1, x.size(1)}, x.options())
      .index_add_(0, group_of_rows(groups, x.size(0)), x)
      .narrow(0, 0, groups.size());
}

at::Tensor group_of_rows(const RowGroups& groups, int64_t rows) {
  const at::Tensor row = at::arange(rows, groups.ends().options());
  return at::searchsorted(groups.ends(), row, /*out_int32=*/false, /*right=*/true);
}

}  // namespace lockstep::kernels
