#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>

/// Matrix products of groups of rows, each group with its own matrix. Operands have two dimensions,
/// the groups' matrices three. Rows after the last group belong to no group: they are not read, and
/// their contents in a result are unspecified.
///
/// The CPU, and a device without a kernel for the operands, compute one product per group; the
/// results of the CPU are those of at::mm to the last bit. CUDA computes all groups in one launch
/// (at::_grouped_mm) in bf16, on GPUs of compute capability 9 and 10, if all widths are multiples
/// of 8 and the operands begin at multiples of 16 bytes. A single launch reads the groups from
/// device memory, so the host does not wait; otherwise the host waits for them once, see RowGroups.
namespace lockstep::kernels {

/// Which rows each group has: the groups follow one another.
class RowGroups : public torch::CustomClassHolder {
 public:
  /// `ends` [groups] of int32: where the next group begins; `rows`: the number of rows of each
  /// group, if the host knows it.
  explicit RowGroups(at::Tensor ends, std::optional<std::vector<int64_t>> rows = {});

  int64_t size() const { return ends_.size(0); }
  const at::Tensor& ends() const { return ends_; }
  /// Number of rows of each group. If it was not passed, the first call waits for the device.
  const std::vector<int64_t>& rows_on_host() const;

 private:
  at::Tensor ends_;
  mutable std::optional<std::vector<int64_t>> rows_;
};

/// Calls visit(group, first row, number of rows) for each group that has rows. The host may wait;
/// see RowGroups::rows_on_host().
template <class Visit>
void for_groups(const RowGroups& groups, Visit visit) {
  int64_t first = 0, group = 0;
  for (const int64_t rows : groups.rows_on_host()) {
    if (rows > 0) visit(group, first, rows);
    first += rows;
    ++group;
  }
}

/// x [rows, in], matrices [groups, in, out] -> [rows, out]: each row times its group's matrix.
at::Tensor grouped_rows(const at::Tensor& x, const at::Tensor& matrices, const RowGroups& groups);

/// a [rows, m], b [rows, n] -> [groups, m, n]: a^T b of each group's rows, zero for a group without
/// rows.
at::Tensor grouped_matrices(const at::Tensor& a, const at::Tensor& b, const RowGroups& groups);

/// x [rows, width] -> [groups, width]: the sum of each group's rows, in bf16 and fp16 added up in
/// fp32, in order. CUDA adds in a different order, which is the same in every run.
at::Tensor grouped_sums(const at::Tensor& x, const RowGroups& groups);

/// The group of each of `rows` rows: [rows] of int64; for a row in no group, the number of groups.
at::Tensor group_of_rows(const RowGroups& groups, int64_t rows);

}  // namespace lockstep::kernels
