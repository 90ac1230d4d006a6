#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "lockstep/core/parameters.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

class LowRankAdapter;

/// y = x W^T (+ b); each rank of tp computes a part of y's features. Parameters: `weight` [out...,
/// in] and `bias` [out...], cut along the last dimension of `out`. If `out` has one dimension, each
/// rank gets consecutive rows. If it is {blocks, rows}, each rank gets its rows of every block, and
/// its part of y holds the blocks one after the other; SwiGLU needs this for its gate and the other
/// half. Muon treats the weight as a matrix, but never the bias. If the specification has `lora_A`
/// and `lora_B` (see adapter_params()), the output of a LowRankAdapter is added to y.
///
/// Either all tp ranks train the weight or none does: with sequence parallelism a rank that has
/// frozen it sends less in backward than the others, which wait for it until the timeout.
/// DistributedDataParallel refuses such a model. For everything else, errors included, see
/// parallel_linear().
class ColumnParallelLinear : public DescribedModule {
 public:
  /// `spec` as column_parallel_linear_params() returns it.
  ColumnParallelLinear(const ParallelContext& context, const ModuleSpec& spec);

  /// `out` is the size over all ranks; its last number must be divisible by the number of ranks
  /// (UsageError). The weight starts with normal values of standard deviation `init_std`, the bias
  /// with zeros. `rows_of_matrices`: see ParamDescription.
  ColumnParallelLinear(const ParallelContext& context, int64_t in_features,
                       std::vector<int64_t> out, bool bias, double init_std,
                       std::vector<int64_t> rows_of_matrices = {});
  /// The same with one dimension of `out_features`.
  ColumnParallelLinear(const ParallelContext& context, int64_t in_features, int64_t out_features,
                       bool bias, double init_std);

  /// `input` [sequence, batch, in], the same on all ranks, or with sequence parallelism this rank's
  /// [sequence / ranks, batch, in] -> [sequence, batch, out / ranks]. Collectives: those of
  /// parallel_linear() and LowRankAdapter. Only the adapter's dropout needs `tokens`.
  at::Tensor forward(const at::Tensor& input, const TokenPositions& tokens = {}) const;

  const at::Tensor& weight() const { return weight_; }

 private:
  ParallelLinearOptions options_;
  at::Tensor weight_;
  at::Tensor bias_;
  std::shared_ptr<const LowRankAdapter> adapter_;  ///< may be null
};

/// y = x W^T (+ b); each rank of tp has a part of x's features and computes one term of the sum.
/// Parameters: `weight` [out, in], cut along `in`, and `bias` [out], on every rank; adapters as
/// above.
class RowParallelLinear : public DescribedModule {
 public:
  /// `spec` as row_parallel_linear_params() returns it.
  RowParallelLinear(const ParallelContext& context, const ModuleSpec& spec);

  /// `in_features` is the size over all ranks and must be divisible by their number (UsageError).
  /// Initial values as above.
  RowParallelLinear(const ParallelContext& context, int64_t in_features, int64_t out_features,
                    bool bias, double init_std);

  /// `input` [sequence, batch, in / ranks] -> the sum of the ranks' terms, plus the bias once:
  /// [sequence, batch, out] by an all-reduce, or with sequence parallelism this rank's [sequence /
  /// ranks, batch, out] by a reduce-scatter, whose backward is an all-gather. See
  /// parallel_linear().
  at::Tensor forward(const at::Tensor& input, const TokenPositions& tokens = {}) const;

 private:
  ParallelLinearOptions options_;
  at::Tensor weight_;
  at::Tensor bias_;
  std::shared_ptr<const LowRankAdapter> adapter_;  ///< may be null
};

/// y = x W^T, computed in full on every rank of tp: nothing is sent. Parameter: `weight` [out, in].
/// Use it between the tensor-parallel regions: without sequence parallelism the gradient of y must
/// be the same on all ranks.
class ReplicatedLinear : public DescribedModule {
 public:
  /// `spec` as replicated_linear_params() returns it.
  ReplicatedLinear(const ParallelContext& context, const ModuleSpec& spec);

  /// `input` [..., in] -> [..., out]
  at::Tensor forward(const at::Tensor& input) const;

 private:
  ParallelLinearOptions options_;
  at::Tensor weight_;
};

/// How the input of a column-parallel product is distributed: see LinearInput.
LinearInput column_parallel_input(const ParallelContext& context);
/// How the output of a row-parallel product is combined: see LinearOutput.
LinearOutput row_parallel_output(const ParallelContext& context);

}  // namespace lockstep
