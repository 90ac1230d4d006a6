#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// How much of each head is rotated, and by which angles.
struct RotaryTable {
  at::Tensor cos, sin;  ///< of the angles: [positions, rotated / 2], fp32, or fp64 for fp64 heads
  /// [sequence] or [sequence, batch] of int64: table rows; undefined: 0 ... sequence - 1
  at::Tensor positions;
};

/// Which query heads of each group are taken: `count` from `first` on.
struct QueryRange {
  int64_t first = 0, count = 0;
};

/// Heads of the same dtype and device.
struct AttentionHeads {
  at::Tensor query;       ///< [sequence, batch, groups * count, channels]
  at::Tensor key, value;  ///< [sequence, batch, groups, channels]
};

/// Extracts the attention heads from `packed` [sequence, batch, groups, heads + 2, channels], where
/// each group has its query heads, its key head and its value head, and rotates channel pairs (i, i
/// + rotated / 2) of queries and keys by the angles of their tokens (Su et al., "RoFormer", 2021);
/// the other channels are copied. fp32, fp64, bf16 or fp16; computed in fp32, or in fp64 for fp64,
/// and rounded once. One pass; the results are new tensors. The host does not wait for a device.
/// UsageError for another dtype, and for a sequence that is longer than the table.
AttentionHeads rotate_heads(const at::Tensor& packed, const RotaryTable& table, QueryRange queries);

/// The gradient of `packed`, which has `heads` query heads per group, from the gradients of the
/// results.
at::Tensor rotate_heads_backward(const AttentionHeads& grads, const RotaryTable& table,
                                 QueryRange queries, int64_t heads);

}  // namespace lockstep::kernels
