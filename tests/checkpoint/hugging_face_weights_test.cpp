#include "lockstep/checkpoint/hugging_face_weights.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <sstream>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

NamedTensors weights_of(const TransformerConfig& config) {
  NamedTensors weights;
  const GPTModel model(config);
  for (const NamedParameter& param : collect_parameters(model))
    weights[param.name] = param.tensor.detach();
  for (const auto& buffer : model.named_buffers()) weights[buffer.key()] = buffer.value();
  return weights;
}

constexpr const char* kDeepSeek =
    "multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6 "
    "q_lora_rank: 6 kv_lora_rank: 5 qk_head_dim: 3 qk_pos_emb_head_dim: 4 v_head_dim: 2 "
    "untie_embeddings_and_output_weights: true num_experts: 3 moe_ffn_hidden_size: 7 "
    "moe_shared_expert_intermediate_size: 14 moe_router_score_function: \"sigmoid\" "
    "moe_router_enable_expert_bias: true";

TEST(HuggingFaceWeights, ComeBack) {
  for (const char* const text :
       {"num_query_groups: 2", "untie_embeddings_and_output_weights: true",
        "num_query_groups: 2 add_qkv_bias: true", "qk_layernorm: true kv_channels: 16",
        "num_experts: 4 num_query_groups: 2", "num_experts: 4 qk_layernorm: true moe_layer_freq: 2",
        kDeepSeek, "add_bias_linear: true num_query_groups: 2",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true untie_embeddings_and_output_weights: true"}) {
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

TEST(HuggingFaceWeights, RotatedRowsOfDeepSeekAreInPairs) {
  // 2 heads of 1 + 4 channels: rows of pairs (1, 3), (2, 4) and (6, 8), (7, 9).
  const TransformerConfig model =
      parse_config("model { hidden_size: 32 num_layers: 1 num_attention_heads: 2 " +
                       std::string(kDeepSeek) + " }",
                   "test", {"model.qk_head_dim=1"})
          .model;
  NamedTensors ours = weights_of(model);
  const std::string layer = "decoder.layers.0.self_attention.",
                    theirs = "model.layers.0.self_attn.";
  ours[layer + "linear_q_up_proj.weight"] = at::arange(10, at::kFloat).view({10, 1});
  ours[layer + "linear_kv_down_proj.weight"] = at::arange(9, at::kFloat).view({9, 1});
  NamedTensors found = to_hugging_face(model, ours);
  EXPECT_TRUE(at::equal(found.at(theirs + "q_b_proj.weight").flatten(),
                        at::tensor({0., 1., 3., 2., 4., 5., 6., 8., 7., 9.}, at::kFloat)));
  EXPECT_TRUE(at::equal(found.at(theirs + "kv_a_proj_with_mqa.weight").flatten(),
                        at::tensor({0., 1., 2., 3., 4., 5., 7., 6., 8.}, at::kFloat)));
  EXPECT_EQ(found.at("model.layers.0.mlp.gate.e_score_correction_bias").numel(), 3);
  // The layer that predicts the token after the next is left out.
  found["model.layers.1.eh_proj.weight"] = at::zeros({1});
  EXPECT_EQ(from_hugging_face(model, found, "m").size(), ours.size());
  found["model.layers.2.eh_proj.weight"] = at::zeros({1});
  EXPECT_TRUE(throws_with<FileError>([&] { from_hugging_face(model, found, "m"); },
                                     "tensor 'model.layers.2.eh_proj.weight' belongs to no"));
}

/// A model in transformers' format, in files.
class HuggingFaceFiles : public ::testing::Test {
 protected:
  static constexpr const char* kFamilies[] = {
      "num_query_groups: 2 untie_embeddings_and_output_weights: true",
      "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
      "activation: \"gelu_tanh\" add_bias_linear: true",
      "num_experts: 3 qk_layernorm: true num_query_groups: 2", "add_bias_linear: true", kDeepSeek};

  /// Writes a model of a family and returns its weights.
  NamedTensors write(const char* family) {
    config_ = parse_config(
        "model { num_layers: 1 hidden_size: 8 num_attention_heads: 4 "
        "ffn_hidden_size: 12 seq_length: 6 vocab_size: 10 " +
            std::string(family) + " }",
        "test");
    const GPTModel model(config_.model);
    std::filesystem::remove_all(ours_);
    save_model(ours_, 0, config_, model);
    export_to_hugging_face(ours_, theirs_.string());
    return load_safetensors(weights_);
  }

  void save(const std::string& name, const NamedTensors& tensors) const {
    save_safetensors(theirs_ / name, {tensors.begin(), tensors.end()});
  }

  ::testing::AssertionResult refuses(const std::string& part) const {
    return throws_with<FileError>(
        [&] { import_from_hugging_face(theirs_.string(), folder_.path() / "back"); }, part);
  }

  testing::TemporaryFolder folder_;
  Config config_;
  const std::string ours_ = folder_.path() / "ours";
  const std::filesystem::path theirs_ = folder_.path() / "theirs";
  const std::string weights_ = theirs_ / "model.safetensors";
};

TEST_F(HuggingFaceFiles, ShapesAndDtypesThatDoNotFitAreRefused) {
  for (const char* const family : kFamilies) {
    const NamedTensors whole = write(family);
    int64_t turned = 0;
    for (const auto& [name, tensor] : whole) {
      NamedTensors damaged = whole;
      damaged[name] = tensor.to(at::kInt);
      save("model.safetensors", damaged);
      EXPECT_TRUE(refuses("tensor '" + name + "': found dtype I32, allowed: floating point"));
      damaged[name] = at::ones({});
      save("model.safetensors", damaged);
      EXPECT_TRUE(refuses("shape [")) << name;
      if (tensor.dim() != 2 || tensor.size(0) == tensor.size(1)) continue;
      damaged[name] = tensor.view({tensor.size(1), tensor.size(0)});
      save("model.safetensors", damaged);
      EXPECT_TRUE(refuses("shape [")) << name;
      ++turned;
    }
    EXPECT_GE(turned, 4);
    EXPECT_FALSE(std::filesystem::exists(folder_.path() / "back"));
  }
}

TEST_F(HuggingFaceFiles, ATiedOutputLayerMayBeThereTwiceButNotInTwoForms) {
  const NamedTensors whole = write(kFamilies[1]);
  NamedTensors with_output = whole;
  const at::Tensor embeddings = whole.at("transformer.wte.weight");
  with_output["lm_head.weight"] = embeddings.clone();
  save("model.safetensors", with_output);
  import_from_hugging_face(theirs_.string(), folder_.path() / "copied");
  for (const at::Tensor& other : {embeddings * 2, embeddings.narrow(0, 0, 3)}) {
    with_output["lm_head.weight"] = other;
    save("model.safetensors", with_output);
    EXPECT_TRUE(refuses("tensor 'lm_head.weight' differs from the embedding"));
  }
}

TEST_F(HuggingFaceFiles, MoreLayersThanTensorsAreRefusedBeforeTheModelIsMade) {
  write(kFamilies[0]);
  std::string json = folder_.read("theirs/config.json");
  const std::string layers = "\"num_hidden_layers\": ";
  json.insert(json.find(layers) + layers.size() + 1, "000000000");
  std::ofstream(theirs_ / "config.json") << json;
  EXPECT_TRUE(refuses("tensors, too few for the 1000000000 layers of the config.json"));
}

TEST_F(HuggingFaceFiles, MoreExpertsThanTensorsAreRefusedBeforeTheirNamesAreMade) {
  write(kFamilies[2]);
  std::string json = folder_.read("theirs/config.json");
  const std::string experts = "\"num_experts\": ";
  json.insert(json.find(experts) + experts.size() + 1, "000000000");
  std::ofstream(theirs_ / "config.json") << json;
  EXPECT_TRUE(refuses("tensors, too few for the 3000000000 experts of the config.json"));
}

TEST_F(HuggingFaceFiles, ExpertsBiasesComeBackAndStayInFp32) {
  config_ = parse_config("model { num_layers: 2 hidden_size: 8 seq_length: 6 vocab_size: 10 " +
                             std::string(kDeepSeek) + " moe_layer_freq: [0, 1] }",
                         "test");
  const GPTModel model(config_.model);
  const std::string name = "decoder.layers.1.mlp.router.expert_bias";
  const at::Tensor bias = at::tensor({0.1F, -0.2F, 1e-3F});
  model.named_buffers()[name].copy_(bias);
  save_model(ours_, 0, config_, model);
  export_to_hugging_face(ours_, theirs_.string(), {.dtype = ExportDtype::bf16});
  const NamedTensors found = load_safetensors(weights_);
  EXPECT_TRUE(at::equal(found.at("model.layers.1.mlp.gate.e_score_correction_bias"), bias));
  EXPECT_EQ(found.at("model.norm.weight").scalar_type(), at::kBFloat16);
  import_from_hugging_face(theirs_.string(), folder_.path() / "back");
  const auto back = load_model(folder_.path() / "back", c10::kCPU).model;
  EXPECT_TRUE(at::equal(back->named_buffers()[name], bias));
}

// As in the cache folders of transformers.
TEST_F(HuggingFaceFiles, FilesMayBeLinks) {
  const NamedTensors whole = write(kFamilies[1]);
  const std::filesystem::path blobs = folder_.path() / "blobs";
  std::filesystem::create_directory(blobs);
  for (const char* const name : {"config.json", "model.safetensors"}) {
    std::filesystem::rename(theirs_ / name, blobs / name);
    std::filesystem::create_symlink("../blobs/" + std::string(name), theirs_ / name);
  }
  const std::string back =
      import_from_hugging_face(theirs_.string(), folder_.path() / "linked").path;
  export_to_hugging_face(back, (folder_.path() / "again").string());
  const NamedTensors again = load_safetensors(folder_.path() / "again" / "model.safetensors");
  for (const auto& [name, tensor] : whole) EXPECT_TRUE(at::equal(again.at(name), tensor)) << name;
}

TEST_F(HuggingFaceFiles, EveryByteOfAHeaderThatIsFlippedOrCutIsFoundOrChangesNothing) {
  const NamedTensors whole = write(kFamilies[0]);
  std::ostringstream text;
  text << std::ifstream(weights_, std::ios::binary).rdbuf();
  const std::string bytes = text.str();
  const size_t header = bytes.find("}}") + 2;
  int refused = 0;
  const auto check = [&](const std::string& damaged, size_t at) {
    std::ofstream(weights_, std::ios::binary) << damaged;
    try {
      NamedTensors tensors = load_safetensors(weights_);
      from_hugging_face(config_.model, tensors, weights_);
      for (const auto& [name, tensor] : whole)
        ASSERT_TRUE(at::equal(tensors.at(name), tensor)) << at;
    } catch (const FileError& error) {
      ASSERT_NE(std::string(error.what()).find("'" + weights_ + "'"), std::string::npos) << at;
      ++refused;
    }
  };
  for (size_t i = 0; i < header; ++i) {
    std::string damaged = bytes;
    damaged[i] = static_cast<char>(damaged[i] ^ (1 << (i % 8)));
    check(damaged, i);
    check(bytes.substr(0, i), i);
  }
  EXPECT_GT(refused, static_cast<int>(2 * header - 40));  // only letters in the metadata
}

}  // namespace
}  // namespace lockstep
