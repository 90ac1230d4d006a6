#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

namespace lockstep::kernels {

/// How much of each head is rotated, by what.
struct RotaryTable {
  at::Tensor cos, sin;  ///< [positions, rotated / 2], fp32, for fp64 heads fp64; of the angles
  /// [sequence] or [sequence, batch] of int64: rows of the tables; undefined: 0 ... sequence - 1
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

/// Takes the heads of attention out of `packed` [sequence, batch, groups, heads + 2, channels],
/// where each group has its query heads, its key head and its value head, and rotates channel pairs
/// (i, i + rotated / 2) of queries and keys by the angles of their tokens (Su et al., "RoFormer",
/// 2021); the other channels pass. fp32, fp64, bf16 or fp16, computed in fp32, in fp64 for fp64,
/// and rounded once. One pass; the results are new tensors. Nothing waits for a device. UsageError
/// for another dtype, and for a sequence that is longer than the table.
AttentionHeads rotate_heads(const at::Tensor& packed, const RotaryTable& table, QueryRange queries);

/// The gradient of `packed`, which has `heads` query heads a group, from those of the results.
at::Tensor rotate_heads_backward(const AttentionHeads& grads, const RotaryTable& table,
                                 QueryRange queries, int64_t heads);

}  // namespace lockstep::kernels
