#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

/// Products of groups of rows, each group with a matrix of its own. Operands have two dimensions,
/// the groups' matrices three. Rows behind the last group belong to none: they are not read, and
/// what stands in them in a result is unspecified.
///
/// The CPU, and a device without a kernel for the operands, compute a product a group; the results
/// of the CPU are those of at::mm to the last bit. CUDA computes all in one launch
/// (at::_grouped_mm) in bf16, on GPUs of compute capability 9 and 10, where all widths are
/// multiples of 8 and the operands begin at multiples of 16 bytes. What is computed in one launch
/// takes the groups from the device's memory, so that the host does not wait; otherwise the host
/// waits for them once, see RowGroups.
namespace lockstep::kernels {

/// Which rows each group has: the groups stand one behind the other.
class RowGroups : public torch::CustomClassHolder {
 public:
  /// `ends` [groups] of int32, where the next group begins; `rows` of each group, where the host
  /// knows them.
  explicit RowGroups(at::Tensor ends, std::optional<std::vector<int64_t>> rows = {});

  int64_t size() const { return ends_.size(0); }
  const at::Tensor& ends() const { return ends_; }
  /// Rows of each group. Where nobody has given them, the first call waits for the device.
  const std::vector<int64_t>& rows_on_host() const;

 private:
  at::Tensor ends_;
  mutable std::optional<std::vector<int64_t>> rows_;
};

/// x [rows, in], matrices [groups, in, out] -> [rows, out]: each row times its group's matrix.
at::Tensor grouped_rows(const at::Tensor& x, const at::Tensor& matrices, const RowGroups& groups);

/// a [rows, m], b [rows, n] -> [groups, m, n]: a^T b of each group's rows, zero for a group without
/// rows.
at::Tensor grouped_matrices(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups);

/// x [rows, width] -> [groups, width]: the sum of each group's rows, added up in their order. CUDA
/// adds in fp32 and in an order of its own, the same in every run.
at::Tensor grouped_sums(const at::Tensor& x, const RowGroups& groups);

/// The group of each of `rows` rows: [rows] of int64; the number of groups for a row of none.
at::Tensor group_of_rows(const RowGroups& groups, int64_t rows);

}  // namespace lockstep::kernels
