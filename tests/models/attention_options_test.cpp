// Windows, norms of queries and keys, and scaled rotary positions, compared with plain libtorch and
// with numbers from Hugging Face's transformers 5.23.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <map>

#include <ATen/ATen.h>

#include "lockstep/core/attention_rules.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/models/attention.h"
#include "lockstep/models/core_attention.h"
#include "lockstep/models/rotary_embedding.h"
#include "lockstep/tests/support/gpt_parts.h"

namespace lockstep {
namespace {

using testing::difference;
using testing::small_gpt;

LayerContext context_of(const TransformerConfig& config) {
  Config whole;
  whole.model = config;
  return {.config = resolve(whole).model, .options = at::TensorOptions().dtype(at::kDouble)};
}

at::Tensor wave(std::vector<int64_t> shape, double seed) {
  const int64_t numel = c10::multiply_integers(shape);
  return at::sin(at::arange(numel, at::kDouble) * 1.3 + seed).view(shape);
}

/// The output of `attend`, and the gradients of its sum of squares with respect to the inputs.
std::vector<at::Tensor> gradients_of(
    const std::function<at::Tensor(const std::vector<at::Tensor>&)>& attend) {
  std::vector<at::Tensor> leaves = {wave({19, 2, 4, 6}, 0.1), wave({19, 2, 2, 6}, 2.2),
                                    wave({19, 2, 2, 6}, 4.5)};
  for (at::Tensor& leaf : leaves) leaf.requires_grad_(true);
  const at::Tensor output = attend(leaves);
  output.square().sum().backward();
  std::vector<at::Tensor> result = {output.detach()};
  for (const at::Tensor& leaf : leaves) result.push_back(leaf.grad());
  return result;
}

/// libtorch's own attention with a mask.
at::Tensor masked(const std::vector<at::Tensor>& qkv, int64_t window) {
  const int64_t length = qkv[0].size(0);
  const at::Tensor seen = at::ones({length, length}, at::kBool).tril().triu(1 - window);
  const auto wide = [](const at::Tensor& x) {
    return x.repeat_interleave(2, 2).permute({1, 2, 0, 3});
  };
  return at::scaled_dot_product_attention(qkv[0].permute({1, 2, 0, 3}), wide(qkv[1]), wide(qkv[2]),
                                          seen)
      .permute({2, 0, 1, 3})
      .flatten(2);
}

TEST(AttentionOptions, AWindowIsAMask) {
  for (const int64_t window : {1, 2, 3, 8, 18, 19, 40})
    for (const double dropout : {0.0, 1e-300}) {  // the latter takes separate operations
      SCOPED_TRACE(fmt::format("{} {}", window, dropout));
      TransformerConfig config = small_gpt();
      config.window_size = window;
      config.attention_dropout = dropout;
      const auto core = make_core_attention(context_of(config), 0);
      const auto found = gradients_of([&](const std::vector<at::Tensor>& qkv) {
        return core->forward(qkv[0], qkv[1], qkv[2], {}, /*training=*/true);
      });
      const auto expected =
          gradients_of([&](const std::vector<at::Tensor>& qkv) { return masked(qkv, window); });
      for (size_t i = 0; i < found.size(); ++i)
        EXPECT_LT(difference(found[i], expected[i]), 1e-13) << i;
    }
}

// transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"], in fp32: head width 16, factor 8,
// original context 64.
TEST(AttentionOptions, Llama3FrequenciesAreThoseOfTransformers) {
  TransformerConfig config;
  config.rope_scaling_type = RopeScaling::llama3;
  config.rope_original_max_position_embeddings = 64;
  const at::Tensor expected = at::tensor(
      {1.0, 0.24438458681106567, 0.013042256236076355, 0.0039528473280370235, 0.0012499999720603228,
       0.00039528473280370235, 0.0001250000059371814, 3.9528473280370235e-05},
      at::kDouble);
  EXPECT_TRUE(at::allclose(rotary_frequencies(config, 16), expected, 1e-6, 0));
  config.rope_scaling_type = RopeScaling::linear;
  const at::Tensor linear = rotary_frequencies(config, 16);
  config.rope_scaling_type = RopeScaling::none;
  EXPECT_TRUE(at::equal(linear * 8, rotary_frequencies(config, 16)));
}

void expect_yarn(const TransformerConfig& config, const std::vector<double>& frequencies,
                 double amplitude) {
  const auto rotated = 2 * static_cast<int64_t>(frequencies.size());
  const at::Tensor expected = at::tensor(frequencies, at::kDouble);
  EXPECT_TRUE(at::allclose(rotary_frequencies(config, rotated), expected, 1e-6, 0))
      << rotary_frequencies(config, rotated);
  EXPECT_NEAR(rotary_amplitude(config), amplitude, 1e-15);
}

// transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"], in fp32: frequencies, and the
// factor on cosines and sines.
TEST(AttentionOptions, YarnIsThatOfTransformers) {
  TransformerConfig config;
  config.rope_scaling_type = RopeScaling::yarn;
  config.rope_scaling_factor = 4;
  config.rope_original_max_position_embeddings = 256;
  expect_yarn(config,
              {1.0, 0.2569350600242615, 0.0625, 0.013834965415298939, 0.0024999999441206455,
               0.0007905694656074047, 0.0002500000118743628, 7.905694656074047e-05},
              1.138629436111989);
  config.rotary_base = 5000;
  config.rope_scaling_factor = 8;
  config.rope_original_max_position_embeddings = 64;
  config.rope_beta_fast = 8;
  config.rope_beta_slow = 2;
  config.rope_mscale = 0.7;
  config.rope_mscale_all_dim = 0.3;
  expect_yarn(
      config,
      {1.0, 0.1939774751663208, 0.01486508920788765, 0.005126208532601595, 0.0017677670111879706,
       0.000609612325206399, 0.00021022409782744944, 7.249553164001554e-05},
      1.0782934613857693);
  EXPECT_NEAR(attention_logit_factor(config), std::pow(0.03 * std::log(8.0) + 1, 2), 1e-15);
  config.rope_scaling_factor = 1;
  EXPECT_EQ(rotary_amplitude(config), 1);
}

TEST(AttentionOptions, YarnScalesTheTablesAndTheLogits) {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 2;
  const SelfAttention plain(context_of(config));
  config.rope_scaling_type = RopeScaling::yarn;
  config.rope_original_max_position_embeddings = 4;
  config.rope_mscale_all_dim = 0.4;
  const SelfAttention layer(context_of(config));
  const at::NoGradGuard no_grad;
  const at::Tensor hidden = wave({8, 3, 16}, 0.7);
  std::map<std::string, at::Tensor> weights;
  for (const NamedParameter& param : collect_parameters(layer)) weights[param.name] = param.tensor;
  const at::Tensor packed =
      at::linear(hidden, weights.at("linear_qkv.weight")).view({8, 3, 2, 4, 4});
  const at::Tensor angles =
      at::outer(at::arange(8, at::kDouble), rotary_frequencies(config, 4)).view({8, 1, 1, 1, 2});
  const double m = 0.1 * std::log(8.0) + 1, all = 0.04 * std::log(8.0) + 1;
  const auto turned = [&](const at::Tensor& x) {
    const auto a = x.narrow(4, 0, 2), b = x.narrow(4, 2, 2);
    const at::Tensor cos = angles.cos() * (m / all), sin = angles.sin() * (m / all);
    return at::cat({a * cos - b * sin, b * cos + a * sin}, 4);
  };
  const at::Tensor query = turned(packed.narrow(3, 0, 2)).flatten(2, 3) * (all * all);
  const at::Tensor key = turned(packed.narrow(3, 2, 1)).squeeze(3);
  const at::Tensor value = packed.narrow(3, 3, 1).squeeze(3);
  const at::Tensor expected =
      at::linear(causal_attention(query, key, value), weights.at("linear_proj.weight"));
  EXPECT_LT(difference(layer.forward(hidden, {}), expected), 1e-13);
  EXPECT_GT(difference(plain.forward(hidden, {}), expected), 1e-3);
}

TEST(AttentionOptions, NormsComeBeforeTheRotationAndAreOfEachHead) {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 2;
  config.qk_layernorm = true;
  const SelfAttention layer(context_of(config));
  TransformerConfig without = config;
  without.qk_layernorm = false;
  const SelfAttention plain(context_of(without));
  std::map<std::string, at::Tensor> weights;
  for (const NamedParameter& param : collect_parameters(layer)) weights[param.name] = param.tensor;
  const at::NoGradGuard no_grad;
  weights.at("q_layernorm.weight").copy_(wave({4}, 0.3));
  weights.at("k_layernorm.weight").copy_(wave({4}, 0.9));
  const at::Tensor hidden = wave({8, 3, 16}, 0.7);
  // Rows: two queries, a key and a value of 4 channels for each of 2 groups.
  const at::Tensor features =
      at::linear(hidden, weights.at("linear_qkv.weight")).view({8, 3, 2, 4, 4});
  const auto normed = [&](const at::Tensor& x, const char* name) {
    const at::Tensor root = (x.square().mean(-1, /*keepdim=*/true) + 1e-5).rsqrt();
    return x * root * weights.at(name);
  };
  const at::Tensor packed =
      at::cat({normed(features.narrow(3, 0, 2), "q_layernorm.weight"),
               normed(features.narrow(3, 2, 1), "k_layernorm.weight"), features.narrow(3, 3, 1)},
              3);
  const auto [query, key, value] = RotaryEmbedding(context_of(config)).heads_of(packed, {0, 2});
  const at::Tensor expected =
      at::linear(causal_attention(query, key, value), weights.at("linear_proj.weight"));
  EXPECT_LT(difference(layer.forward(hidden, {}), expected), 1e-13);
  EXPECT_GT(difference(plain.forward(hidden, {}), expected), 1e-3);
}

}  // namespace
}  // namespace lockstep
