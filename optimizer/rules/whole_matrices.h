#pragma once

// Internal: matrices that are cut over tensor-parallel ranks.

#include <cstdint>
#include <memory>
#include <optional>

#include "lockstep/optimizer/update_rule.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// How tensor-parallel ranks (for an expert: expert-tensor-parallel ones) hold a parameter.
class MatrixCut {
 public:
  MatrixCut(const NamedParameter& param, const ParallelState& state);

  bool is_cut() const { return dim_.has_value(); }
  /// The dimension of the parameter along which it is cut, from 0. Only if is_cut().
  int64_t dim() const { return *dim_; }
  MeshAxis axis() const { return axis_; }

  /// The pieces of all ranks, joined along `dim`; this rank has `piece`. Collective: one
  /// all-gather.
  at::Tensor joined(const at::Tensor& piece, int64_t dim) const;
  /// This rank's piece of `whole`.
  at::Tensor own(const at::Tensor& whole, int64_t dim) const;

 private:
  MeshAxis axis_;
  ProcessGroup group_;
  std::optional<int64_t> dim_;
  std::string label_;
};

/// A rule of UpdateUnit::matrix that gets each matrix whole, on all ranks that have a piece of it.
/// Collective over these: one all-gather of the weights, one of the gradient and one of each state.
std::shared_ptr<const UpdateRule> with_whole_matrices(std::shared_ptr<const UpdateRule> rule,
                                                      const ParallelState& state);

}  // namespace lockstep
