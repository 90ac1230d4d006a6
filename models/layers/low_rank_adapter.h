#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include "lockstep/models/dropout.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/models/token_positions.h"

namespace lockstep {

/// The term that a low-rank adapter adds to the output of a linear layer: alpha / rank * B
/// (A dropout(x)), with A [rank, in] and B [out..., rank] as adapter_params() declares them. With t
/// tokens on a rank between the tensor-parallel regions and T in them, it sends over tp, in
/// addition to what the layer sends:
///
///     for a layer that is        forward                   backward
///     column-parallel            nothing                   all-reduce of T rank elements
///     the same, with sequence    all-gather of             all-gather of t rank elements again,
///     parallelism                t rank elements           reduce-scatter of T rank elements
///     row-parallel               all-reduce of T rank      nothing
///     the same, with sequence    reduce-scatter of         all-gather of t rank elements
///     parallelism                T rank elements
///
/// So the matrix that all ranks of tp hold (A for a column-parallel layer, B for a row-parallel
/// one) works between the tensor-parallel regions, and its gradient is in
/// ParallelContext::replicated_gradient_state().
class LowRankAdapter {
 public:
  enum class Beside { columns, rows };  ///< a column-parallel layer, a row-parallel one

  /// `context` is the layer's, whose `lora` has rank, alpha and dropout.
  LowRankAdapter(const ParallelContext& context, at::Tensor a, at::Tensor b, Beside beside);

  /// `input` and output as in the layer. `tokens` are those of the input; dropout needs them.
  at::Tensor forward(const at::Tensor& input, const TokenPositions& tokens, bool training) const;

 private:
  at::Tensor dropped(const at::Tensor& input, const TokenPositions& tokens, bool training) const;

  Beside beside_;
  double scale_;
  ParallelLinearOptions of_a_, of_b_;
  at::Tensor a_, b_;
  Dropout dropout_;
};

/// `weight` [out..., in] with its adapter merged into it: weight + alpha / rank * B A, in the dtype
/// of `weight`, whose columns and rows are all on this rank.
at::Tensor merged_weight(const at::Tensor& weight, const at::Tensor& a, const at::Tensor& b,
                         const LoraConfig& lora);

}  // namespace lockstep
