#include "lockstep/training/score.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"

namespace lockstep {
namespace {

TEST(Score, IsTheSumOfEachTokensOwnLoss) {
  const TransformerConfig config =
      parse_config(
          "model { num_layers: 2 hidden_size: 16 num_attention_heads: 2 seq_length: 12 "
          "vocab_size: 20 hidden_dropout: 0.5 }",
          "test")
          .model;
  const GPTModel model(config, {.dtype = at::kDouble});
  std::vector<ScoreTokens> requests;
  for (const int64_t length : {13, 2, 7, 7, 3, 13}) {
    ScoreTokens request;
    for (int64_t i = 0; i < length; ++i)
      request.ids.push_back((5 * i + static_cast<int64_t>(requests.size())) % 20);
    request.scored = std::min<int64_t>(length - 1, 3);
    requests.push_back(request);
  }
  // A continuation that the model itself would generate.
  ScoreTokens greedy{{4, 2}, 1};
  const auto next = [&] {
    for (const auto& child : model.children()) child->eval();
    const at::Tensor logits = model.forward(at::tensor(greedy.ids, at::kLong).unsqueeze(0));
    return logits[0][-1].argmax().item<int64_t>();
  };
  greedy.ids.pop_back();
  for (int i = 0; i < 4; ++i) greedy.ids.push_back(next());
  greedy.scored = 4;
  requests.push_back(greedy);
  requests.push_back({{4}, 0});
  requests.push_back({{4, 2, 3}, 0});
  for (const auto& child : model.children()) child->train();
  const auto scores = score(model, requests);
  for (const auto& module : model.modules(/*include_self=*/false))
    EXPECT_TRUE(module->is_training()) << module->name();
  for (const auto& child : model.children()) child->eval();  // for the comparison
  ASSERT_EQ(scores.size(), requests.size());
  for (size_t i = 0; i < requests.size(); ++i) {
    if (requests[i].scored == 0) {
      EXPECT_EQ(scores[i].logprob, 0);
      EXPECT_TRUE(scores[i].is_greedy);
      continue;
    }
    const at::Tensor ids = at::tensor(requests[i].ids, at::kLong).unsqueeze(0);
    const int64_t length = ids.size(1) - 1;
    const at::Tensor losses = model.forward(ids.narrow(1, 0, length), ids.narrow(1, 1, length));
    EXPECT_NEAR(scores[i].logprob,
                -losses[0].slice(0, length - requests[i].scored).sum().item<double>(), 1e-12)
        << i;
    const at::Tensor best = model.forward(ids.narrow(1, 0, length))[0].argmax(1);
    EXPECT_EQ(scores[i].is_greedy, best.slice(0, length - requests[i].scored)
                                       .equal(ids[0].slice(0, length + 1 - requests[i].scored)))
        << i;
  }
  EXPECT_TRUE(scores[requests.size() - 3].is_greedy);
  EXPECT_TRUE(score(model, {}).empty());
}

}  // namespace
}  // namespace lockstep
