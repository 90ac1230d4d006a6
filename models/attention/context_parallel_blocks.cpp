#include "lockstep/models/context_parallel_blocks.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/narrow_dtype.h"
#include "lockstep/core/planned_cpu.h"

namespace lockstep {
namespace {

struct Output {
  at::Tensor out;
  at::Tensor log_sum_exp;
};

struct Gradients {
  at::Tensor query, key, value;
};

/// The inputs of a kernel: [batch, heads, sequence, channels].
struct Operands {
  at::Tensor query, key, value;
  BlockMask mask = BlockMask::none;

  bool causal() const { return mask == BlockMask::causal; }
};

/// The sequences of `x`, along `dim`, that belong to the block.
at::Tensor of_sequences(const at::Tensor& x, int64_t dim, const AttentionBlock& block) {
  return block.sequences ? x.narrow(dim, block.sequences->start, block.sequences->size) : x;
}

at::Tensor heads_first(const at::Tensor& x, const Chunk& rows, const AttentionBlock& block) {
  return of_sequences(x, 1, block).narrow(0, rows.start, rows.size).permute({1, 2, 0, 3});
}
at::Tensor sequence_first(const at::Tensor& x) { return x.permute({2, 0, 1, 3}); }

at::Tensor spread(const at::Tensor& x, int64_t heads) {
  const int64_t repeats = heads / x.size(1);
  return repeats == 1 ? x : x.repeat_interleave(repeats, 1);
}

/// Adds up the heads of `gradient` that share one of the `heads` heads.
at::Tensor fold(const at::Tensor& gradient, int64_t heads) {
  if (gradient.size(1) == heads) return gradient;
  return gradient.unflatten(1, {heads, gradient.size(1) / heads}).sum(2);
}

Operands spread(const Operands& x) {
  const int64_t heads = x.query.size(1);
  return {x.query, spread(x.key, heads), spread(x.value, heads), x.mask};
}

at::Tensor plain_scores(const Operands& x) {
  const auto wide = BlockwiseAttentionGradient::wide(x.query);
  const at::Tensor scores = at::matmul(x.query.to(wide), x.key.to(wide).transpose(-1, -2))
                                .div_(std::sqrt(static_cast<double>(x.query.size(-1))));
  if (!x.causal()) return scores;
  const at::Tensor later =
      at::ones({x.query.size(2), x.key.size(2)}, scores.options().dtype(at::kBool)).triu(1);
  return scores.masked_fill_(later, -std::numeric_limits<double>::infinity());
}

Output plain_forward(const Operands& x) {
  const at::Tensor scores = plain_scores(x);
  const at::Tensor log_sum_exp = scores.logsumexp(-1);
  const at::Tensor weights = scores.sub_(log_sum_exp.unsqueeze(-1)).exp_().to(x.value);
  return {at::matmul(weights, x.value), log_sum_exp};
}

Gradients plain_backward(const Operands& x, const at::Tensor& grad, const Output& y) {
  const at::Tensor weights = plain_scores(x).sub_(y.log_sum_exp.unsqueeze(-1)).exp_();
  const at::Tensor wide_grad = grad.to(weights);
  const at::Tensor of_weights = at::matmul(wide_grad, x.value.to(weights).transpose(-1, -2));
  const at::Tensor of_scores = of_weights.sub_((wide_grad * y.out).sum(-1, /*keepdim=*/true))
                                   .mul_(weights)
                                   .div_(std::sqrt(static_cast<double>(x.query.size(-1))))
                                   .to(grad);
  return {at::matmul(of_scores, x.key), at::matmul(of_scores.transpose(-1, -2), x.query),
          at::matmul(weights.to(grad).transpose(-1, -2), grad)};
}

/// Reverses the order of queries and keys, which turns anti-causal into causal.
at::Tensor reversed(const at::Tensor& x) { return x.flip(2); }

Operands reversed(const Operands& x) {
  return {reversed(x.query), reversed(x.key), reversed(x.value), BlockMask::causal};
}

Output forward_block(const Operands& x, AttentionKernel kernel) {
  if (x.mask == BlockMask::anti_causal) {
    const Output y = forward_block(reversed(x), kernel);
    return {reversed(y.out), reversed(y.log_sum_exp)};
  }
  switch (kernel) {
    case AttentionKernel::cpu_flash: {
      const auto [out, log_sum_exp] = at::_scaled_dot_product_flash_attention_for_cpu(
          x.query, x.key, x.value, /*dropout_p=*/0.0, x.causal());
      return {out, log_sum_exp};
    }
    case AttentionKernel::cuda_flash: {
      const Operands y = spread(x);
      const auto result = at::_scaled_dot_product_flash_attention(y.query, y.key, y.value,
                                                                  /*dropout_p=*/0.0, y.causal());
      return {std::get<0>(result), std::get<1>(result)};
    }
    default:
      return plain_forward(spread(x));
  }
}

Gradients cuda_flash_backward(const Operands& x, const at::Tensor& grad, const Output& y) {
  const at::Tensor no_seed = at::zeros({2}, grad.options().dtype(at::kLong));
  const auto [query, key, value] = at::_scaled_dot_product_flash_attention_backward(
      grad, x.query, x.key, x.value, y.out, y.log_sum_exp.contiguous(), {}, {}, x.query.size(2),
      x.key.size(2), /*dropout_p=*/0.0, x.causal(), no_seed, no_seed);
  return {query, key, value};
}

Gradients backward_block(const Operands& x, const at::Tensor& grad, const Output& y,
                         AttentionKernel kernel) {
  if (x.mask == BlockMask::anti_causal) {
    const Gradients z = backward_block(reversed(x), reversed(grad),
                                       {reversed(y.out), reversed(y.log_sum_exp)}, kernel);
    return {reversed(z.query), reversed(z.key), reversed(z.value)};
  }
  if (kernel == AttentionKernel::cpu_flash) {
    const auto [query, key, value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad, x.query, x.key, x.value, y.out, y.log_sum_exp, /*dropout_p=*/0.0, x.causal());
    return {query, key, value};
  }
  const int64_t heads = x.key.size(1);
  const Operands wide = spread(x);
  Gradients result = kernel == AttentionKernel::cuda_flash ? cuda_flash_backward(wide, grad, y)
                                                           : plain_backward(wide, grad, y);
  return {result.query, fold(result.key, heads), fold(result.value, heads)};
}

}  // namespace

AttentionKernel attention_kernel(const at::Tensor& query) {
  if (query.is_cpu() || (query.is_meta() && plans_cpu())) return AttentionKernel::cpu_flash;
  const int64_t channels = query.size(-1);
  return is_narrow(query.scalar_type()) && channels % 8 == 0 && channels <= 256
             ? AttentionKernel::cuda_flash
             : AttentionKernel::plain;
}

BlockwiseAttention::BlockwiseAttention(const at::Tensor& query, AttentionKernel kernel)
    : query_(query), kernel_(kernel) {}

void BlockwiseAttention::add(const AttentionBlock& block, const at::Tensor& key,
                             const at::Tensor& value) {
  const Output part =
      forward_block({heads_first(query_, block.queries, block), heads_first(key, block.keys, block),
                     heads_first(value, block.keys, block), block.mask},
                    kernel_);
  const auto wide = BlockwiseAttentionGradient::wide(query_);
  const at::Tensor out = sequence_first(part.out).to(wide);
  const at::Tensor log_sum_exp = part.log_sum_exp.to(wide);
  if (!output_.defined() && block.queries.size == query_.size(0) && !block.sequences) {
    output_ = out;
    log_sum_exp_ = log_sum_exp;
    return;
  }
  if (!output_.defined()) {
    output_ = at::zeros(query_.sizes(), query_.options().dtype(wide));
    log_sum_exp_ = at::full({query_.size(1), query_.size(2), query_.size(0)},
                            -std::numeric_limits<double>::infinity(), output_.options());
  }
  at::Tensor sum =
      of_sequences(output_, 1, block).narrow(0, block.queries.start, block.queries.size);
  at::Tensor sum_log =
      of_sequences(log_sum_exp_, 0, block).narrow(2, block.queries.start, block.queries.size);
  const at::Tensor merged = at::logaddexp(sum_log, log_sum_exp);
  const auto share = [&](const at::Tensor& log) {
    return (log - merged).exp().permute({2, 0, 1}).unsqueeze(-1);
  };
  sum.mul_(share(sum_log)).addcmul_(out, share(log_sum_exp));
  sum_log.copy_(merged);
}

at::Tensor BlockwiseAttention::output() const {
  return output_.to(query_.scalar_type()).contiguous();
}

BlockwiseAttentionGradient::BlockwiseAttentionGradient(at::Tensor query, at::Tensor output,
                                                       at::Tensor log_sum_exp,
                                                       at::Tensor grad_output,
                                                       AttentionKernel kernel)
    : query_(std::move(query)),
      output_(std::move(output)),
      log_sum_exp_(std::move(log_sum_exp)),
      grad_output_(std::move(grad_output)),
      kernel_(kernel),
      query_gradient_(at::zeros(query_.sizes(), query_.options().dtype(wide(query_)))) {}

void BlockwiseAttentionGradient::add(const AttentionBlock& block, const at::Tensor& key,
                                     const at::Tensor& value, const at::Tensor& key_gradient,
                                     const at::Tensor& value_gradient) {
  const auto rows = [&](const at::Tensor& x, const Chunk& chunk) {
    return heads_first(x, chunk, block);
  };
  const Gradients part = backward_block(
      {rows(query_, block.queries), rows(key, block.keys), rows(value, block.keys), block.mask},
      rows(grad_output_, block.queries),
      {rows(output_, block.queries),
       of_sequences(log_sum_exp_, 0, block).narrow(2, block.queries.start, block.queries.size)},
      kernel_);
  rows(query_gradient_, block.queries).add_(part.query);
  rows(key_gradient, block.keys).add_(part.key);
  rows(value_gradient, block.keys).add_(part.value);
}

at::ScalarType BlockwiseAttentionGradient::wide(const at::Tensor& like) {
  return like.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace lockstep
