#include "lockstep/training/checkpoint/hugging_face_weights.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt/gpt_model.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

NamedTensors weights_of(const TransformerConfig& config) {
  NamedTensors weights;
  for (const NamedParameter& param : collect_parameters(GPTModel(config)))
    weights[param.name] = param.tensor.detach();
  return weights;
}

TEST(HuggingFaceWeights, ComeBack) {
  for (const char* const text :
       {"num_query_groups: 2", "untie_embeddings_and_output_weights: true",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true"}) {
    const TransformerConfig model =
        parse_config("model { hidden_size: 32 " + std::string(text) + " }", "test").model;
    const NamedTensors ours = weights_of(model);
    NamedTensors theirs = to_hugging_face(model, ours);
    const NamedTensors back = from_hugging_face(model, theirs, "m");
    ASSERT_EQ(back.size(), ours.size());
    for (const auto& [name, weight] : ours)
      EXPECT_TRUE(at::equal(back.at(name).view(weight.sizes()), weight)) << name;
    theirs["odd"] = at::zeros({1});
    EXPECT_TRUE(throws_with<FileError>([&] { from_hugging_face(model, theirs, "m"); },
                                       "'m': tensor 'odd' belongs to no weight"));
    theirs.erase("odd");
    const auto lost = theirs.begin()->first;
    theirs.erase(lost);
    EXPECT_TRUE(throws_with<FileError>([&] { from_hugging_face(model, theirs, "m"); },
                                       "'m': tensor '" + lost + "' is missing"));
  }
}

TEST(HuggingFaceWeights, RowsOfGroupedQueriesLieWhereLlamaHasThem) {
  // 4 query heads in 2 groups, 8 channels: rows q0 q1 k0 v0 | q2 q3 k1 v1.
  const TransformerConfig model =
      parse_config("model { hidden_size: 32 num_layers: 1 num_query_groups: 2 }", "test").model;
  NamedTensors ours = weights_of(model);
  const std::string layer = "decoder.layers.0.", theirs = "model.layers.0.";
  const at::Tensor rows = at::arange(64, at::kFloat).unsqueeze(1).expand({64, 32}).contiguous();
  ours[layer + "self_attention.linear_qkv.weight"] = rows;
  const NamedTensors found = to_hugging_face(model, ours);
  const auto first = [&](const std::string& name, int64_t row) {
    return found.at(theirs + "self_attn." + name + "_proj.weight")[row][0].item<float>();
  };
  EXPECT_EQ(first("q", 8), 8);
  EXPECT_EQ(first("q", 16), 32);
  EXPECT_EQ(first("k", 0), 16);
  EXPECT_EQ(first("k", 8), 48);
  EXPECT_EQ(first("v", 15), 63);
  const at::Tensor fc1 = ours.at(layer + "mlp.linear_fc1.weight").reshape({2, -1, 32});
  EXPECT_TRUE(at::equal(found.at(theirs + "mlp.gate_proj.weight"), fc1[0]));
  EXPECT_TRUE(at::equal(found.at(theirs + "mlp.up_proj.weight"), fc1[1]));
}

}  // namespace
}  // namespace lockstep
