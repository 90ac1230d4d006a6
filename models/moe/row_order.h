#pragma once

#include <cstdint>
#include <memory>

#include <ATen/core/Tensor.h>

#include "lockstep/models/routing.h"

/// Rows for the pairs of a token and an expert that takes it, sorted by expert, then by token, and
/// the conversions between tokens and rows. Everything is computed on the routing's device, nobody
/// waits for it, and nothing is added up in an order that differs from run to run.
namespace lockstep {

struct RowOrder {
  at::Tensor tokens;    ///< [rows]: the token of each row; any token after the last pair's row
  at::Tensor places;    ///< [rows]: where its pair is in the routing's weights, flattened
  at::Tensor of_pair;   ///< [tokens, experts]: the pair's row, any number where it is not chosen
  at::Tensor chosen;    ///< the routing's map
  at::Tensor of_token;  ///< [n, tokens]: a token's rows, in the order of the experts
  at::Tensor missing;   ///< [n, tokens] of bool: there is no such row; undefined: there always is
};
using RowOrderPtr = std::shared_ptr<const RowOrder>;

/// `rows` may be more than the pairs, not fewer.
RowOrderPtr order_rows(const Routing& routing, int64_t rows);

/// The token's row of `tokens` [tokens, width] for each row: [rows, width].
at::Tensor rows_of_tokens(const at::Tensor& tokens, const RowOrderPtr& order);

/// For each token the sum of its rows, from 0 in the order of the experts: [tokens, width]. In bf16
/// and fp16 it is added up in fp32.
at::Tensor sums_of_rows(const at::Tensor& rows, const RowOrderPtr& order);

/// [rows] of `weights` [tokens, experts].
at::Tensor weights_of_rows(const at::Tensor& weights, const RowOrderPtr& order);

/// A list of rows in blocks, sorted one way, and the order that sorts it the other way.
struct BlockOrder {
  at::Tensor forth, back;  ///< [rows]
};

/// `blocks` [a, b] are the rows of each block of the list, (0, 0), (0, 1), and so on, which are
/// `rows` together; the other list has (0, 0), (1, 0), and so on.
BlockOrder transpose_blocks(const at::Tensor& blocks, int64_t rows);

/// Row forth[i] of x for each i; back is the inverse.
at::Tensor reorder_rows(const at::Tensor& x, const BlockOrder& order);

}  // namespace lockstep
