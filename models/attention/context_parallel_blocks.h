#pragma once

// Internal: attention of queries to keys that arrive block by block.

#include <ATen/core/Tensor.h>

#include "lockstep/models/context_parallel_cut.h"

/// Tensors are [sequence, batch, heads, channels]; keys and values may have fewer heads, whose
/// number is a divisor; each serves neighbouring query heads. Sums over blocks are kept in fp32, or
/// in fp64 for fp64.
namespace lockstep {

/// The implementation that computes a block.
enum class AttentionKernel {
  cpu_flash,   ///< libtorch's flash attention on the CPU: any floating-point dtype
  cuda_flash,  ///< libtorch's flash attention on CUDA: bf16 and fp16, head widths of 8, 16, ... 256
  plain,       ///< matrix products and a softmax; holds the block's scores, like sums in fp32
};

/// The kernel for tensors like `query`.
AttentionKernel attention_kernel(const at::Tensor& query);

/// softmax(q k^T / sqrt(channels)) v over blocks of keys, merged by their log-sum-exp.
class BlockwiseAttention {
 public:
  BlockwiseAttention(const at::Tensor& query, AttentionKernel kernel);

  /// Lets queries of the block see its keys. `key` and `value` are the tensors that its offsets
  /// refer to. In the end every query must have seen a key.
  void add(const AttentionBlock& block, const at::Tensor& key, const at::Tensor& value);

  /// Like `query`.
  at::Tensor output() const;
  /// [batch, heads, sequence]
  at::Tensor log_sum_exp() const { return log_sum_exp_; }

 private:
  at::Tensor query_;
  AttentionKernel kernel_;
  at::Tensor output_;
  at::Tensor log_sum_exp_;
};

/// The gradient of BlockwiseAttention, block by block.
class BlockwiseAttentionGradient {
 public:
  /// `output` and `log_sum_exp` are those of all blocks together.
  BlockwiseAttentionGradient(at::Tensor query, at::Tensor output, at::Tensor log_sum_exp,
                             at::Tensor grad_output, AttentionKernel kernel);

  /// Adds the block's part to query_gradient(), and to `key_gradient` and `value_gradient` [the
  /// sizes of the keys; in wide()].
  void add(const AttentionBlock& block, const at::Tensor& key, const at::Tensor& value,
           const at::Tensor& key_gradient, const at::Tensor& value_gradient);

  /// The gradient of the queries, in wide().
  const at::Tensor& query_gradient() const { return query_gradient_; }

  /// The dtype of the sums: fp64 for fp64, else fp32.
  static at::ScalarType wide(const at::Tensor& like);

 private:
  at::Tensor query_, output_, log_sum_exp_, grad_output_;
  AttentionKernel kernel_;
  at::Tensor query_gradient_;
};

}  // namespace lockstep
