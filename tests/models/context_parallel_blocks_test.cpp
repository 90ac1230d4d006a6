// The kernel of blockwise attention that is made of matrix products, compared with a softmax over
// all keys in fp64 and its autograd.

#include "lockstep/models/context_parallel_blocks.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr int64_t kTokens = 512, kChannels = 12;

at::Tensor sines(int64_t heads, double phase) {
  const at::Tensor number = at::arange(kTokens * 2 * heads * kChannels, at::kDouble);
  return number.mul(1.3).add(phase).sin().mul(1.5).view({kTokens, 2, heads, kChannels});
}

/// Queries, keys, values and the gradient of the output, rounded to `dtype`.
std::vector<at::Tensor> block_inputs(at::ScalarType dtype) {
  return {sines(4, 0.1).to(dtype), sines(2, 2.2).to(dtype), sines(2, 4.5).to(dtype),
          sines(4, 7.0).to(dtype)};
}

struct BlockResults {
  at::Tensor output, log_sum_exp;
  std::vector<at::Tensor> gradients;  ///< of queries, keys and values
};

BlockResults by_plain_kernel(const std::vector<at::Tensor>& x) {
  const AttentionBlock block{{0, kTokens}, {0, kTokens}, BlockMask::causal};
  BlockwiseAttention attention(x[0], AttentionKernel::plain);
  attention.add(block, x[1], x[2]);
  const auto wide = x[1].options().dtype(BlockwiseAttentionGradient::wide(x[1]));
  const at::Tensor key = at::zeros(x[1].sizes(), wide), value = at::zeros(x[2].sizes(), wide);
  BlockwiseAttentionGradient gradient(x[0], attention.output(), attention.log_sum_exp(), x[3],
                                      AttentionKernel::plain);
  gradient.add(block, x[1], x[2], key, value);
  return {attention.output(), attention.log_sum_exp(), {gradient.query_gradient(), key, value}};
}

BlockResults by_softmax(const std::vector<at::Tensor>& x) {
  std::vector<at::Tensor> leaves, by_head;
  for (size_t i = 0; i < 3; ++i) {
    leaves.push_back(x[i].to(at::kDouble).clone().requires_grad_(true));
    by_head.push_back(leaves[i].repeat_interleave(4 / x[i].size(2), 2).permute({1, 2, 0, 3}));
  }
  const at::Tensor later = at::ones({kTokens, kTokens}, at::kBool).triu(1);
  const at::Tensor scores = at::matmul(by_head[0], by_head[1].transpose(2, 3))
                                .div(std::sqrt(static_cast<double>(kChannels)))
                                .masked_fill(later, -std::numeric_limits<double>::infinity());
  const at::Tensor output = at::matmul(at::softmax(scores, -1), by_head[2]).permute({2, 0, 1, 3});
  output.backward(x[3].to(at::kDouble));
  return {output.detach(),
          at::logsumexp(scores.detach(), -1),
          {leaves[0].grad(), leaves[1].grad(), leaves[2].grad()}};
}

/// The largest error, relative to the largest expected value.
double error_of(const at::Tensor& found, const at::Tensor& expected) {
  const double apart = (found.to(at::kDouble) - expected).abs().max().item<double>();
  return apart / expected.abs().max().item<double>();
}

struct BlockRounding {
  at::ScalarType dtype, wide;
  double results, log_sum_exp;  ///< bounds
};

/// The bound for bf16 and fp16 is one unit in the last place of the largest value.
TEST(BlockwiseAttention, ThePlainKernelRoundsItsResultsAlone) {
  for (const BlockRounding& each : {BlockRounding{at::kDouble, at::kDouble, 1e-12, 1e-12},
                                    BlockRounding{at::kFloat, at::kFloat, 5e-6, 1e-6},
                                    BlockRounding{at::kBFloat16, at::kFloat, 1.0 / 128, 1e-6},
                                    BlockRounding{at::kHalf, at::kFloat, 1.0 / 1024, 1e-6}}) {
    SCOPED_TRACE(at::toString(each.dtype));
    const std::vector<at::Tensor> inputs = block_inputs(each.dtype);
    const BlockResults found = by_plain_kernel(inputs), expected = by_softmax(inputs);
    EXPECT_EQ(found.output.scalar_type(), each.dtype);
    EXPECT_EQ(found.log_sum_exp.scalar_type(), each.wide);
    EXPECT_LT(error_of(found.output, expected.output), each.results);
    EXPECT_LT(error_of(found.log_sum_exp, expected.log_sum_exp), each.log_sum_exp);
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(found.gradients[i].scalar_type(), each.wide);
      EXPECT_LT(error_of(found.gradients[i], expected.gradients[i]), each.results) << "input " << i;
    }
  }
}

}  // namespace
}  // namespace lockstep
