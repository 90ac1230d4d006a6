// The parameters that the layers state: the modules register exactly these.

#include "lockstep/models/layer_params.h"

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/models/gpt_model.h"

namespace lockstep {
namespace {

struct Listed {
  std::string name;
  std::vector<int64_t> shape;
  bool operator==(const Listed&) const = default;
};

void PrintTo(const Listed& listed, std::ostream* out) {
  *out << listed.name << " " << ::testing::PrintToString(listed.shape);
}

std::vector<Listed> listed(const torch::nn::Module& module) {
  std::vector<Listed> list;
  for (const NamedParameter& param : collect_parameters(module))
    list.push_back({param.name, param.tensor.sizes().vec()});
  return list;
}

std::vector<Listed> listed(const ModuleSpec& spec) {
  std::vector<Listed> list;
  for (const ParamSpec& param : spec.all()) list.push_back({param.name, param.shape});
  return list;
}

TransformerConfig stated_config() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 16;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.ffn_hidden_size = 24;
  config.seq_length = 8;
  config.vocab_size = 11;
  config.add_bias_linear = true;
  return resolve_model(config);
}

TEST(LayerParams, AnMlpMovesWithItsSpecification) {
  const TransformerConfig config = stated_config();
  const LayerContext context{
      .config = config, .options = at::TensorOptions(at::kDouble), .name = "mlp."};
  ModuleSpec spec = mlp_params(context.settings(), 24);
  EXPECT_EQ(listed(MLP(context, spec)), listed(spec));
  EXPECT_EQ(listed(MLP(context, 24)), listed(spec));

  ModuleSpec& first = spec.children[0];
  first.params.pop_back();              // the bias
  first.params[0].shape = {2, 40, 16};  // wider
  first.params[0].values = ConstantValue{0.25};
  first.params[0].description.apply_weight_decay = false;
  const MLP changed(context, spec);
  EXPECT_EQ(listed(changed), listed(spec));
  const auto params = collect_parameters(changed);
  EXPECT_TRUE(at::equal(params[0].tensor, at::full({2, 40, 16}, 0.25, at::kDouble)));
  EXPECT_FALSE(params[0].description.apply_weight_decay);
}

TEST(LayerParams, ALayerWithoutAStatementIsRefused) {
  const TransformerConfig config = stated_config();
  const LayerContext context{.config = config, .options = at::TensorOptions(at::kDouble)};
  ModuleSpec spec = transformer_layer_params(context.settings());
  spec.children[1].children.pop_back();
  try {
    const TransformerLayer layer(context, spec);
    FAIL() << "accepted";
  } catch (const UsageError& error) {
    EXPECT_STREQ(error.what(),
                 "module 'self_attention': found no child 'linear_proj' in its specification, "
                 "allowed: linear_qkv");
  }
}

// Names and shapes of Megatron Core's GPTModel, written out.
TEST(LayerParams, StatedAreMegatronsNamesAndShapes) {
  TransformerConfig config = stated_config();
  config.num_layers = 1;
  config.normalization = Normalization::LayerNorm;
  config.position_embedding_type = PositionEmbeddingType::learned_absolute;
  config.untie_embeddings_and_output_weights = true;
  const std::string layer = "decoder.layers.0.";
  const std::vector<Listed> expected = {{"embedding.word_embeddings.weight", {12, 16}},
                                        {"embedding.position_embeddings.weight", {8, 16}},
                                        {layer + "input_layernorm.weight", {16}},
                                        {layer + "input_layernorm.bias", {16}},
                                        {layer + "self_attention.linear_qkv.weight", {32, 16}},
                                        {layer + "self_attention.linear_qkv.bias", {32}},
                                        {layer + "self_attention.linear_proj.weight", {16, 16}},
                                        {layer + "self_attention.linear_proj.bias", {16}},
                                        {layer + "pre_mlp_layernorm.weight", {16}},
                                        {layer + "pre_mlp_layernorm.bias", {16}},
                                        {layer + "mlp.linear_fc1.weight", {2, 24, 16}},
                                        {layer + "mlp.linear_fc1.bias", {2, 24}},
                                        {layer + "mlp.linear_fc2.weight", {16, 24}},
                                        {layer + "mlp.linear_fc2.bias", {16}},
                                        {"decoder.final_layernorm.weight", {16}},
                                        {"decoder.final_layernorm.bias", {16}},
                                        {"output_layer.weight", {12, 16}}};
  config.make_vocab_size_divisible_by = 4;
  EXPECT_EQ(listed(gpt_params({config}, GPTStage::whole(config))), expected);
  EXPECT_EQ(listed(GPTModel(config)), expected);
}

TEST(LayerParams, ALaterStageCountsItsLayersOverTheWholeModel) {
  const TransformerConfig config = stated_config();
  const auto names = [](const std::vector<Listed>& list) {
    std::vector<std::string> result;
    for (const Listed& item : list) result.push_back(item.name);
    return result;
  };
  const auto last = names(listed(gpt_params({config}, {1, 1, false, true})));
  EXPECT_EQ(last.front(), "decoder.layers.1.input_layernorm.weight");
  EXPECT_EQ(last.back(), "embedding.word_embeddings.weight");
}

}  // namespace
}  // namespace lockstep
