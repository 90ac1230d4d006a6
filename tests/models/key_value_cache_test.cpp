#include "lockstep/models/key_value_cache.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

GPTModel cached_model(const std::string& more) {
  return GPTModel(parse_config("model { num_layers: 3 hidden_size: 32 num_attention_heads: 4 "
                               "seq_length: 16 vocab_size: 40 init_method_std: 0.2 " +
                                   more + " }",
                               "test")
                      .model,
                  {.dtype = at::kDouble});
}

GPTInput piece(const at::Tensor& tokens, int64_t first, int64_t last,
               const std::shared_ptr<KeyValueCache>& cache) {
  GPTInput input{.tokens = tokens.slice(1, first, last)};
  input.positions.cache = cache;
  return input;
}

TEST(KeyValueCache, LogitsAreThoseOfTheWholeSequenceHoweverItIsCut) {
  const at::NoGradGuard no_grad;
  for (const char* const more :
       {"", "num_query_groups: 2", "num_query_groups: 1 rotary_percent: 0.5",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\"",
        "num_experts: 4 moe_router_topk: 2",
        "multi_latent_attention: true kv_lora_rank: 12 qk_head_dim: 6 qk_pos_emb_head_dim: 4 "
        "v_head_dim: 5 window_size: 6",
        "multi_latent_attention: true q_lora_rank: 9 qk_layernorm: true v_head_dim: 200 "
        "rope_scaling_type: \"yarn\" rope_mscale_all_dim: 1"}) {
    const GPTModel model = cached_model(more);
    const at::Tensor tokens = at::arange(48).mul(7).remainder(40).view({3, 16});
    const at::Tensor whole = model.forward(tokens);
    for (const std::vector<int64_t>& cuts :
         {std::vector<int64_t>{16}, {1, 1, 1, 1, 12}, {5, 4, 1, 6}, {15, 1}}) {
      const auto cache = std::make_shared<KeyValueCache>(16);
      std::vector<at::Tensor> parts;
      for (const int64_t count : cuts) {
        const int64_t first = cache->length();
        parts.push_back(model.forward(piece(tokens, first, first + count, cache)));
        EXPECT_EQ(cache->length(), first + count);
      }
      EXPECT_LT((at::cat(parts, 1) - whole).abs().max().item<double>(), 1e-12) << more;
    }
  }
}

TEST(KeyValueCache, TakesAllTokensIfOnlyTheLastHasLogits) {
  const at::NoGradGuard no_grad;
  for (const char* const more :
       {"", "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\""}) {
    const GPTModel model = cached_model(more);
    const at::Tensor tokens = at::arange(48).mul(7).remainder(40).view({3, 16});
    const at::Tensor whole = model.forward(tokens);
    const auto cache = std::make_shared<KeyValueCache>(16);
    for (const int64_t count : {9, 1, 6}) {
      const int64_t first = cache->length(), last = first + count - 1;
      GPTInput input = piece(tokens, first, first + count, cache);
      input.last_only = true;
      const at::Tensor found = model.forward(input);
      EXPECT_EQ(cache->length(), first + count);
      ASSERT_EQ(found.sizes(), at::IntArrayRef({3, 1, 40}));
      EXPECT_LT((found - whole.narrow(1, last, 1)).abs().max().item<double>(), 1e-12) << more;
    }
    const at::Tensor found = model.forward(GPTInput{.tokens = tokens, .last_only = true});
    ASSERT_EQ(found.sizes(), at::IntArrayRef({3, 1, 40}));
    EXPECT_LT((found - whole.narrow(1, 15, 1)).abs().max().item<double>(), 1e-12) << more;
  }
}

TEST(KeyValueCache, RefusesWhatItHasNoRoomFor) {
  const at::NoGradGuard no_grad;
  const GPTModel model = cached_model("");
  const at::Tensor tokens = at::zeros({2, 17}, at::kLong);
  const auto cache = std::make_shared<KeyValueCache>(8);
  model.forward(piece(tokens, 0, 6, cache));
  EXPECT_TRUE(throws_with<UsageError>([&] { model.forward(piece(tokens, 6, 9, cache)); },
                                      "KeyValueCache: found 9 tokens, allowed: 8"));
  EXPECT_TRUE(
      throws_with<UsageError>([&] { model.forward(piece(tokens.narrow(0, 0, 1), 6, 7, cache)); },
                              "KeyValueCache: found a batch of 1, allowed: 2"));
  EXPECT_TRUE(throws_with<UsageError>([&] { model.forward(piece(tokens, 0, 11, cache)); },
                                      "found 6 tokens and 11 more, allowed: 16"));
  GPTInput with_positions = piece(tokens, 6, 7, cache);
  with_positions.positions.positions = at::tensor({6}, at::kLong);
  EXPECT_TRUE(
      throws_with<UsageError>([&] { model.forward(with_positions); }, "found positions beside it"));
  EXPECT_EQ(cache->length(), 6);
}

TEST(KeyValueCache, RefusesWhatIsUnlikeTheKeysBefore) {
  KeyValueCache cache(8);
  const at::Tensor key = at::ones({3, 2, 4, 6});
  EXPECT_EQ(cache.append(5, key, key).first.sizes(), key.sizes());
  const auto append = [&](const at::Tensor& keys, const at::Tensor& values) {
    return [&cache, keys, values] { cache.append(5, keys, values); };
  };
  EXPECT_TRUE(throws_with<UsageError>(append(key, key.narrow(3, 0, 5)),
                                      "found a key [3, 2, 4, 6] of Float and a value [3, 2, 4, 5] "
                                      "of Float, allowed: [sequence, batch, groups, channels]"));
  for (const at::Tensor& other : {key.narrow(2, 0, 1), key.narrow(3, 0, 1), key.to(at::kBFloat16)})
    EXPECT_TRUE(throws_with<UsageError>(append(other, other), "allowed: [..., 4, 6] of Float"));
  EXPECT_TRUE(throws_with<UsageError>(append(key[0], key[0]), "found a key [2, 4, 6] of Float"));
  cache.advance(3);
  EXPECT_TRUE(throws_with<UsageError>(append(at::ones({6, 2, 4, 6}), at::ones({6, 2, 4, 6})),
                                      "found 9 tokens, allowed: 8"));
  const auto [keys, values] = cache.append(5, key + 1, key + 2);
  EXPECT_TRUE(at::equal(keys, at::cat({key, key + 1})));
  EXPECT_TRUE(at::equal(values, at::cat({key, key + 2})));
}

// Compared with a softmax for each head, in a loop.
TEST(CachedAttention, IsThatOfEachHeadWithItsGroupInTheWindow) {
  for (const int64_t count : {1, 3})
    for (const std::optional<int64_t> window :
         {std::optional<int64_t>(), std::optional<int64_t>(1), std::optional<int64_t>(4),
          std::optional<int64_t>(7), std::optional<int64_t>(20)}) {
      const at::Tensor query = at::randn({count, 2, 6, 4}, at::kDouble);
      const at::Tensor memory = at::randn({2, 9, 2, 2, 4}, at::kDouble);
      const at::Tensor keys = memory[0].narrow(0, 0, 7), values = memory[1].narrow(0, 0, 7);
      const at::Tensor found = cached_attention(query, keys, values, window).view({count, 2, 6, 4});
      for (int64_t row = 0; row < count; ++row)
        for (int64_t sample = 0; sample < 2; ++sample)
          for (int64_t head = 0; head < 6; ++head) {
            const int64_t last = 7 - count + row + 1;
            const int64_t first = std::max<int64_t>(0, last - window.value_or(last));
            const auto of_group = [&](const at::Tensor& all) {
              return all.slice(0, first, last).select(1, sample).select(1, head / 3);
            };
            const at::Tensor weights =
                at::softmax(at::mv(of_group(keys), query[row][sample][head]) / 2, 0);
            const at::Tensor expected = at::mv(of_group(values).t(), weights);
            EXPECT_LT((found[row][sample][head] - expected).abs().max().item<double>(), 1e-14);
          }
    }
}

}  // namespace
}  // namespace lockstep
