// Latent attention against plain libtorch.

#include "lockstep/models/latent_attention.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/models/rotary_embedding.h"
#include "lockstep/tests/support/gpt_parts.h"

namespace lockstep {
namespace {

using testing::difference;
using testing::small_gpt;
using Weights = std::map<std::string, at::Tensor>;

LayerContext latent_context(const TransformerConfig& config, at::ScalarType dtype = at::kDouble) {
  Config whole;
  whole.model = config;
  return {.config = resolve(whole).model, .options = at::TensorOptions().dtype(dtype)};
}

TransformerConfig small_latent() {
  TransformerConfig config = small_gpt();
  config.multi_latent_attention = true;
  config.qk_layernorm = true;
  config.q_lora_rank = 10;
  config.kv_lora_rank = 7;
  config.qk_head_dim = 5;
  config.qk_pos_emb_head_dim = 4;
  config.v_head_dim = 6;
  return config;
}

Weights weights_of(const LatentAttention& layer) {
  Weights weights;
  const at::NoGradGuard no_grad;
  for (const NamedParameter& param : collect_parameters(layer)) {
    weights[param.name] = param.tensor;
    const auto wave = at::sin(at::arange(param.tensor.numel(), at::kDouble) * 1.7 + 0.3);
    if (param.name.find("norm") != std::string::npos)
      at::Tensor(param.tensor).copy_(1 + 0.3 * wave.view(param.tensor.sizes()));
  }
  return weights;
}

at::Tensor plain_norm(const at::Tensor& x, const Weights& weights, const std::string& name) {
  const auto found = weights.find(name + ".weight");
  if (found == weights.end()) return x;
  return x * (x.square().mean(-1, /*keepdim=*/true) + 1e-5).rsqrt() * found->second;
}

/// Rotates the pairs (i, i + half) by position times frequency.
at::Tensor plain_turn(const at::Tensor& x, const TransformerConfig& config) {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor angles =
      at::outer(at::arange(x.size(0), at::kDouble), rotary_frequencies(config, 2 * half))
          .view({x.size(0), 1, 1, half});
  const at::Tensor a = x.narrow(-1, 0, half), b = x.narrow(-1, half, half);
  return at::cat({a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()}, -1);
}

/// Multiplies the scores by `logits`, and the rotated channels of queries and keys by `amplitude`.
at::Tensor plain_latent_attention(const TransformerConfig& config, const Weights& weights,
                                  const at::Tensor& hidden, double amplitude, double logits) {
  const int64_t n = config.qk_head_dim, r = config.qk_pos_emb_head_dim, v = config.v_head_dim;
  const int64_t sequence = hidden.size(0), batch = hidden.size(1);
  const int64_t heads = config.num_attention_heads, rank = config.kv_lora_rank;
  const auto linear = [&](const at::Tensor& x, const std::string& name) {
    return at::matmul(x, weights.at(name + ".weight").t());
  };
  const at::Tensor queries =
      config.q_lora_rank
          ? linear(plain_norm(linear(hidden, "linear_q_down_proj"), weights, "q_layernorm"),
                   "linear_q_up_proj")
          : linear(hidden, "linear_q_proj");
  const at::Tensor q = queries.view({sequence, batch, heads, n + r});
  const at::Tensor down = linear(hidden, "linear_kv_down_proj");
  const at::Tensor kv =
      linear(plain_norm(down.narrow(2, 0, rank), weights, "kv_layernorm"), "linear_kv_up_proj")
          .view({sequence, batch, heads, n + v});
  const at::Tensor shared = down.narrow(2, rank, r).unsqueeze(2);
  const at::Tensor query =
      at::cat({q.narrow(3, 0, n), amplitude * plain_turn(q.narrow(3, n, r), config)}, 3);
  const at::Tensor key =
      at::cat({kv.narrow(3, 0, n),
               (amplitude * plain_turn(shared, config)).expand({sequence, batch, heads, r})},
              3);
  at::Tensor seen = at::ones({sequence, sequence}, at::kBool).tril();
  if (config.window_size) seen = seen.triu(1 - *config.window_size);
  const at::Tensor scores = at::einsum("sbhc,tbhc->bhst", {query, key}) *
                            (logits / std::sqrt(static_cast<double>(n + r)));
  const at::Tensor mixed =
      at::einsum("bhst,tbhc->sbhc",
                 {scores.masked_fill(~seen, -std::numeric_limits<double>::infinity()).softmax(-1),
                  kv.narrow(3, n, v)});
  return linear(mixed.flatten(2), "linear_proj");
}

struct Passed {
  at::Tensor output;
  std::map<std::string, at::Tensor> gradients;
};

Passed run(const Weights& weights, const std::function<at::Tensor(const at::Tensor&)>& attend) {
  const at::Tensor hidden =
      at::sin(at::arange(8 * 3 * 16, at::kDouble) * 0.9).view({8, 3, 16}).requires_grad_(true);
  for (const auto& [name, weight] : weights) weight.mutable_grad() = at::Tensor();
  Passed passed;
  passed.output = attend(hidden);
  passed.output.square().sum().backward();
  passed.gradients["hidden"] = hidden.grad();
  for (const auto& [name, weight] : weights) passed.gradients[name] = weight.grad();
  return passed;
}

void expect_plain(const TransformerConfig& config, double amplitude = 1, double logits = 1) {
  const LatentAttention layer(latent_context(config));
  const Weights weights = weights_of(layer);
  const Passed found = run(weights, [&](const at::Tensor& x) { return layer.forward(x, {}); });
  const Passed expected = run(weights, [&](const at::Tensor& x) {
    return plain_latent_attention(config, weights, x, amplitude, logits);
  });
  EXPECT_GT(expected.output.abs().max().item<double>(), 0.1);
  EXPECT_LT(difference(found.output, expected.output), 1e-13);
  EXPECT_EQ(found.gradients.size(), weights.size() + 1);
  for (const auto& [name, gradient] : expected.gradients) {
    EXPECT_LT(difference(found.gradients.at(name), gradient), 1e-13) << name;
    EXPECT_GT(gradient.abs().max().item<double>(), 1e-4) << name;
  }
}

TEST(LatentAttention, IsThatOfPlainOperations) {
  TransformerConfig config = small_latent();
  expect_plain(config);
  for (const int64_t value : {3, 9, 14}) {  // narrower than, equal to, wider than keys
    SCOPED_TRACE(value);
    config.v_head_dim = value;
    expect_plain(config);
    config.recompute_granularity = RecomputeGranularity::selective;
    expect_plain(config);
    config.recompute_granularity = RecomputeGranularity::none;
    config.window_size = 3;
    expect_plain(config);
    config.window_size.reset();
    config.attention_dropout = 1e-300;  // takes separate operations
    expect_plain(config);
    config.attention_dropout = 0;
  }
}

TEST(LatentAttention, WithoutACompressedQueryAndWithoutNorms) {
  TransformerConfig config = small_latent();
  config.q_lora_rank.reset();
  expect_plain(config);
  config.qk_layernorm = false;
  expect_plain(config);
  config.q_lora_rank = 10;
  expect_plain(config);
}

TEST(LatentAttention, YarnScalesRotatedChannelsAndAllLogits) {
  TransformerConfig config = small_latent();
  config.rope_scaling_type = RopeScaling::yarn;
  config.rope_scaling_factor = 40;
  config.rope_original_max_position_embeddings = 16;
  const auto mscale = [](double weight) { return 0.1 * weight * std::log(40.0) + 1; };
  expect_plain(config, mscale(1));
  config.rope_mscale_all_dim = 1;  // as in DeepSeek-V3
  expect_plain(config, 1, mscale(1) * mscale(1));
  config.rope_mscale = 0.7;
  config.rope_mscale_all_dim = 0.3;
  config.v_head_dim = 14;
  expect_plain(config, mscale(0.7) / mscale(0.3), mscale(0.3) * mscale(0.3));
}

TEST(LatentAttention, RoundsOnceInHalfPrecision) {
  const TransformerConfig config = small_latent();
  const LatentAttention exact(latent_context(config));
  const LatentAttention narrow(latent_context(config, at::kBFloat16));
  const auto all = collect_parameters(narrow), wide = collect_parameters(exact);
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < all.size(); ++i) at::Tensor(wide[i].tensor).copy_(all[i].tensor);
  const at::Tensor hidden = at::sin(at::arange(8 * 16, at::kDouble)).view({8, 1, 16});
  const at::Tensor found = narrow.forward(hidden.to(at::kBFloat16), {});
  EXPECT_EQ(found.scalar_type(), at::kBFloat16);
  EXPECT_LT(difference(found.to(at::kDouble), exact.forward(hidden, {})), 0.05);
}

TEST(LatentAttention, ASequenceLongerThanTheTableIsRefused) {
  const LatentAttention layer(latent_context(small_latent()));
  EXPECT_THROW(layer.forward(at::zeros({9, 1, 16}, at::kDouble), {}), UsageError);
}

}  // namespace
}  // namespace lockstep
