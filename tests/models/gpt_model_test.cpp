#include "lockstep/models/gpt_model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

constexpr int64_t kVocabulary = 11, kSequence = 8, kBatch = 3;

TransformerConfig small_config() {
  TransformerConfig config;
  config.num_layers = 2;
  config.hidden_size = 16;
  config.num_attention_heads = 4;
  config.num_query_groups = 2;
  config.ffn_hidden_size = 24;
  config.seq_length = kSequence;
  config.vocab_size = kVocabulary;
  config.untie_embeddings_and_output_weights = true;
  return config;
}

TransformerConfig gpt2_config() {
  TransformerConfig config = small_config();
  config.num_query_groups.reset();
  config.normalization = Normalization::LayerNorm;
  config.position_embedding_type = PositionEmbeddingType::learned_absolute;
  config.activation = Activation::gelu;
  config.untie_embeddings_and_output_weights = false;
  config.add_bias_linear = true;
  return config;
}

std::pair<at::Tensor, at::Tensor> tokens_and_labels() {
  const at::Tensor i = at::arange(kBatch * (kSequence + 1)).view({kBatch, kSequence + 1});
  const at::Tensor ids = (i * i + 3 * i).remainder(kVocabulary);
  return {ids.slice(1, 0, kSequence), ids.slice(1, 1)};
}

std::map<std::string, at::Tensor> parameters_of(const GPTModel& model) {
  std::map<std::string, at::Tensor> parameters;
  for (const NamedParameter& param : collect_parameters(model))
    parameters[param.name] = param.tensor;
  return parameters;
}

/// Compares with Hugging Face's model; see scripts/golden/gpt.py.
void expect_golden(const TransformerConfig& config, const std::string& name) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/models/gpt_golden.json");
  const auto golden = nlohmann::json::parse(file).at(name);
  GPTModel model(config, {.dtype = at::kDouble});
  auto parameters = parameters_of(model);
  ASSERT_EQ(parameters.size(), golden["parameters"].size());
  double ordinal = 0;
  for (const auto& entry : golden["parameters"]) {
    const std::string param = entry["name"];
    ASSERT_TRUE(parameters.contains(param)) << param;
    at::Tensor& tensor = parameters[param];
    const auto shape = entry["shape"].get<std::vector<int64_t>>();
    ASSERT_EQ(tensor.flatten(0, std::max<int64_t>(tensor.dim() - 2, 0)).sizes().vec(), shape)
        << param;  // fc1 of SwiGLU is [2, ffn, hidden]
    const bool norm = param.find("norm") != std::string::npos && param.ends_with("weight");
    const at::Tensor wave =
        at::sin(at::arange(tensor.numel(), at::kDouble) * 0.37 + ordinal) * (norm ? 0.1 : 0.3);
    const at::NoGradGuard no_grad;
    tensor.copy_((wave + (norm ? 1.0 : 0.0)).view(tensor.sizes()));
    ++ordinal;
  }
  const auto [tokens, labels] = tokens_and_labels();
  const at::Tensor losses = model.forward(tokens, labels);
  losses.sum().backward();
  const auto expected = golden["losses"].get<std::vector<double>>();
  EXPECT_TRUE(at::allclose(losses.flatten(), at::tensor(expected, at::kDouble), 1e-12, 1e-12));
  for (const auto& entry : golden["parameters"]) {
    const at::Tensor grad = parameters[entry["name"].get<std::string>()].grad();
    const at::Tensor wave = at::cos(at::arange(grad.numel(), at::kDouble) * 0.11);
    const double norm = entry["gradient"][0], probe = entry["gradient"][1];
    EXPECT_NEAR(grad.norm().item<double>(), norm, 1e-11 * (1 + norm)) << entry["name"];
    EXPECT_NEAR((grad.flatten() * wave).sum().item<double>(), probe, 1e-11 * (1 + norm))
        << entry["name"];
  }
}

TEST(GPTModel, EqualsHuggingFaceLlama) { expect_golden(small_config(), "llama"); }

TEST(GPTModel, EqualsHuggingFaceGPT2) { expect_golden(gpt2_config(), "gpt2"); }

TEST(GPTModel, InitialWeightsHaveMegatronsSpread) {
  TransformerConfig config;
  config.num_layers = 8;
  config.hidden_size = 256;
  config.seq_length = 16;
  const GPTModel model(config);
  for (const NamedParameter& param : collect_parameters(model)) {
    const double spread = param.tensor.std().item<double>();
    if (param.name.find("norm") != std::string::npos)
      EXPECT_TRUE(at::equal(param.tensor, at::ones_like(param.tensor))) << param.name;
    else if (param.name.find("linear_proj") != std::string::npos ||
             param.name.find("linear_fc2") != std::string::npos)
      EXPECT_NEAR(spread, 0.02 / 4, 0.0025 * 0.02) << param.name;
    else
      EXPECT_NEAR(spread, 0.02, 0.01 * 0.02) << param.name;
  }
}

TEST(GPTModel, InitialWeightsDependOnSeedAndNameAlone) {
  TransformerConfig deeper = small_config();
  deeper.num_layers = 3;
  const auto a = parameters_of(GPTModel(small_config()));
  const auto b = parameters_of(GPTModel(deeper));
  const auto c = parameters_of(GPTModel(small_config(), {.seed = 7}));
  const auto d = parameters_of(GPTModel(small_config(), {.dtype = at::kDouble}));
  const std::string qkv = "decoder.layers.1.self_attention.linear_qkv.weight";
  EXPECT_TRUE(at::equal(a.at(qkv), b.at(qkv)));
  EXPECT_FALSE(at::equal(a.at(qkv), c.at(qkv)));
  EXPECT_TRUE(at::equal(a.at(qkv), d.at(qkv).to(at::kFloat)));
  EXPECT_FALSE(at::equal(a.at(qkv), a.at("decoder.layers.0.self_attention.linear_qkv.weight")));
}

TEST(GPTModel, FirstLossIsThatOfAUniformGuess) {
  const auto [tokens, labels] = tokens_and_labels();
  const double loss = GPTModel(small_config()).forward(tokens, labels).mean().item<double>();
  EXPECT_NEAR(loss, std::log(static_cast<double>(kVocabulary)), 0.02);
}

TEST(GPTModel, LossIsThatOfTheLogitsAndLooksOnlyBack) {
  const GPTModel model(small_config(), {.dtype = at::kDouble});
  const auto [tokens, labels] = tokens_and_labels();
  const at::Tensor logits = model.forward(tokens);
  ASSERT_EQ(logits.sizes().vec(), (std::vector<int64_t>{kBatch, kSequence, kVocabulary}));
  const at::Tensor expected = -at::log_softmax(logits, 2).gather(2, labels.unsqueeze(2)).squeeze(2);
  EXPECT_TRUE(at::allclose(model.forward(tokens, labels), expected, 1e-12));

  at::Tensor changed = tokens.clone();
  changed.select(1, 5).add_(1).remainder_(kVocabulary);
  const at::Tensor same = model.forward(changed).eq(logits).all(2).all(0);
  EXPECT_TRUE(same.slice(0, 0, 5).all().item<bool>());
  EXPECT_FALSE(same[5].item<bool>());
}

TEST(GPTModel, OnlyMatricesDecay) {
  for (const NamedParameter& param : collect_parameters(GPTModel(gpt2_config())))
    EXPECT_EQ(param.description.apply_weight_decay, param.tensor.dim() >= 2) << param.name;
}

/// Names of the parameters that Muon updates.
std::set<std::string> matrices_of(const GPTModel& model) {
  std::set<std::string> names;
  for (const NamedParameter& param : collect_parameters(model))
    if (param.description.update == ParamUpdate::matrix) names.insert(param.name);
  return names;
}

TEST(GPTModel, MatricesOfTheLayersAreMarkedAndNothingElse) {
  EXPECT_EQ(
      matrices_of(GPTModel(gpt2_config(), {})),
      (std::set<std::string>{
          "decoder.layers.0.self_attention.linear_qkv.weight",
          "decoder.layers.0.self_attention.linear_proj.weight",
          "decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.0.mlp.linear_fc2.weight",
          "decoder.layers.1.self_attention.linear_qkv.weight",
          "decoder.layers.1.self_attention.linear_proj.weight",
          "decoder.layers.1.mlp.linear_fc1.weight", "decoder.layers.1.mlp.linear_fc2.weight"}));
  TransformerConfig experts = small_config();
  experts.position_embedding_type = PositionEmbeddingType::learned_absolute;
  experts.add_bias_linear = true;
  experts.num_experts = 4;
  experts.moe_layer_freq = {2};
  experts.moe_shared_expert_intermediate_size = 12;
  EXPECT_EQ(matrices_of(GPTModel(experts, {})),
            (std::set<std::string>{"decoder.layers.0.self_attention.linear_qkv.weight",
                                   "decoder.layers.0.self_attention.linear_proj.weight",
                                   "decoder.layers.0.mlp.router.weight",
                                   "decoder.layers.0.mlp.shared_experts.linear_fc1.weight",
                                   "decoder.layers.0.mlp.shared_experts.linear_fc2.weight",
                                   "decoder.layers.1.self_attention.linear_qkv.weight",
                                   "decoder.layers.1.self_attention.linear_proj.weight",
                                   "decoder.layers.1.mlp.linear_fc1.weight",
                                   "decoder.layers.1.mlp.linear_fc2.weight"}));
}

TEST(GPTModel, WordEmbeddingsAndOutputLayerAreMarked) {
  TransformerConfig untied = gpt2_config();
  untied.untie_embeddings_and_output_weights = true;
  const auto marked = [](const TransformerConfig& config) {
    std::vector<std::string> names;
    for (const NamedParameter& param : collect_parameters(GPTModel(config)))
      if (param.description.is_embedding_or_output) names.push_back(param.name);
    return names;
  };
  const std::string words = "embedding.word_embeddings.weight";
  EXPECT_EQ(marked(gpt2_config()), (std::vector{words}));
  EXPECT_EQ(marked(untied), (std::vector<std::string>{words, "output_layer.weight"}));
}

TEST(GPTModel, Bf16LossesAreInFp32AndClose) {
  const auto [tokens, labels] = tokens_and_labels();
  const at::Tensor wide = GPTModel(small_config()).forward(tokens, labels);
  const at::Tensor narrow =
      GPTModel(small_config(), {.dtype = at::kBFloat16}).forward(tokens, labels);
  EXPECT_EQ(narrow.scalar_type(), at::kFloat);
  EXPECT_TRUE(at::allclose(narrow, wide, 0.01, 0));
}

TEST(GPTModel, PartlyRotatedAndWithoutPositions) {
  // Without positions, two prefixes with the same tokens in different order give the same last
  // logits. With rotation of half the channels they do not.
  TransformerConfig config = small_config();
  config.num_layers = 1;
  const at::Tensor forth = at::tensor({1, 2, 3}, at::kLong).unsqueeze(0);
  const at::Tensor back = at::tensor({2, 1, 3}, at::kLong).unsqueeze(0);
  const auto last_logits_agree = [&] {
    const GPTModel model(config, {.dtype = at::kDouble});
    return at::allclose(model.forward(forth)[0][2], model.forward(back)[0][2], 1e-10, 1e-14);
  };
  config.position_embedding_type = PositionEmbeddingType::none;
  EXPECT_TRUE(last_logits_agree());
  config.position_embedding_type = PositionEmbeddingType::rope;
  config.rotary_percent = 0.5;
  EXPECT_FALSE(last_logits_agree());
}

TEST(GPTModel, RefusesOtherShapesAndConfigurations) {
  const GPTModel model(small_config());
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        model.forward(at::zeros({1, 9}, at::kLong));
      },
      "sequence <= model.seq_length (8)"));
  EXPECT_TRUE(throws_with<UsageError>([&] { model.forward(at::zeros({1, 4})); }, "of Float"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        model.forward(at::zeros({1, 4}, at::kLong), at::zeros({1, 5}, at::kLong));
      },
      "labels"));
  TransformerConfig config = small_config();
  const GPTModel last(config, {}, ParallelState::single_process(), {1, 1, false, true});
  const auto refuses = [](const GPTModel& stage, const GPTInput& input, const char* message) {
    EXPECT_TRUE(throws_with<UsageError>([&] { stage.forward(input); }, message));
  };
  const at::Tensor ids = at::zeros({2, 8}, at::kLong), rows = at::ones({8, 2, 16});
  refuses(last, {.hidden = at::ones({9, 2, 16})},
          "hidden: found a sequence of 9, allowed: <= model.seq_length (8)");
  refuses(last, {.labels = ids.t(), .hidden = rows},
          "labels: found 8 x 2, allowed: 2 x 8, as of hidden");
  refuses(model, {.tokens = ids, .positions = {.positions = at::arange(4)}},
          "positions: found 4 of Long, allowed: 8 of Long");
  refuses(model, {.tokens = ids, .positions = {.positions = at::ones({8})}},
          "positions: found 8 of Float, allowed: 8 of Long");
  refuses(model, {.tokens = ids, .positions = {.positions = at::arange(8) + 1}},
          "GPTModel: positions: found 8, allowed: 0 to 7");
  const at::Tensor places = at::arange(8).unsqueeze(1).expand({8, 2});
  refuses(model, {.tokens = ids, .positions = {.document_positions = places.to(at::kInt)}},
          "GPTModel: document_positions: found 16 of Int, allowed: 16 of Long");
  refuses(model, {.tokens = ids, .positions = {.document_positions = places - 1}},
          "GPTModel: document_positions: found -1, allowed: 0 to 7");
  refuses(model, {.tokens = ids, .labels = ids, .last_only = true},
          "last_only: found labels beside it, allowed: whole sequences of at least one token");
  refuses(model, {.tokens = ids.narrow(1, 0, 0), .last_only = true}, "last_only: found no token");
  config.num_query_groups = 3;
  EXPECT_TRUE(throws_with<ConfigError>([&] { GPTModel model(config); }, "model.num_query_groups"));
}

}  // namespace
}  // namespace lockstep
