// config.json of Hugging Face's families: import, export, and what is refused.

#include "lockstep/checkpoint/hugging_face_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

constexpr const char* kDeepSeekFields =
    "num_layers: 3 multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6 "
    "q_lora_rank: 24 kv_lora_rank: 20 qk_head_dim: 12 qk_pos_emb_head_dim: 6 v_head_dim: 10 "
    "untie_embeddings_and_output_weights: true num_experts: 8 moe_ffn_hidden_size: 16 "
    "moe_shared_expert_intermediate_size: 32 moe_router_score_function: \"sigmoid\" "
    "moe_router_enable_expert_bias: true moe_router_topk: 4 moe_router_num_groups: 4 "
    "moe_router_group_topk: 2 moe_router_topk_scaling_factor: 2.5 moe_layer_freq: [0, 0, 1] "
    "rope_scaling_type: \"yarn\" rope_scaling_factor: 40 rope_mscale_all_dim: 1";
constexpr const char* kPlainDeepSeekFields =
    "multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6 num_experts: 4 "
    "moe_router_topk: 1 moe_shared_expert_intermediate_size: 512 "
    "moe_router_score_function: \"sigmoid\" moe_router_enable_expert_bias: true";

TEST(HuggingFaceConfig, TellsWhichFieldFitsNoFamily) {
  const auto model = [](const std::string& text) {
    return parse_config("model { " + text + " }", "test").model;
  };
  const auto refuses = [&](const std::string& text, const std::string& part) {
    return throws_with<ConfigError>([&] { hugging_face_family(model(text)); }, part);
  };
  EXPECT_EQ(hugging_face_family(model("")), HuggingFaceFamily::llama);
  EXPECT_EQ(hugging_face_family(model("add_qkv_bias: true")), HuggingFaceFamily::qwen2);
  EXPECT_EQ(hugging_face_family(model("window_size: 4")), HuggingFaceFamily::mistral);
  EXPECT_EQ(hugging_face_family(model("qk_layernorm: true window_size: 4")),
            HuggingFaceFamily::qwen3);
  EXPECT_EQ(hugging_face_family(model("num_experts: 4")), HuggingFaceFamily::mixtral);
  EXPECT_EQ(hugging_face_family(model("num_experts: 4 qk_layernorm: true")),
            HuggingFaceFamily::qwen3_moe);
  EXPECT_TRUE(refuses("add_qkv_bias: true qk_layernorm: true",
                      "model.add_qkv_bias: found true, allowed in a Qwen3 model: false"));
  EXPECT_TRUE(
      refuses("num_experts: 4 moe_layer_freq: 2", "model.moe_layer_freq: layer 1 is dense"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_router_pre_softmax: true",
                      "found true, allowed in a Mixtral model: false"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_router_score_function: \"sigmoid\"",
                      "found sigmoid, allowed in a Mixtral model: softmax"));
  EXPECT_TRUE(refuses("num_experts: 4 moe_shared_expert_intermediate_size: 8",
                      "found 8, allowed in a Mixtral model: unset"));
  EXPECT_TRUE(refuses("rope_scaling_type: \"yarn\" rope_mscale_all_dim: 1",
                      "model.rope_mscale_all_dim: found 1, allowed in a Llama model: 0"));
  const std::string latent = kDeepSeekFields;
  EXPECT_EQ(hugging_face_family(model(latent)), HuggingFaceFamily::deepseek_v3);
  const auto refuses_latent = [&](const std::string& field, const std::string& part) {
    const Config config = parse_config("model { " + latent + " }", "test", {"model." + field});
    return throws_with<ConfigError>([&] { hugging_face_family(config.model); }, part);
  };
  EXPECT_TRUE(refuses_latent("layernorm_epsilon=1e-5",
                             "found 1e-05, allowed in a DeepSeek-V3 model: 1e-06"));
  EXPECT_TRUE(refuses_latent("qk_layernorm=false", "model.qk_layernorm: found false"));
  EXPECT_TRUE(refuses_latent("window_size=8", "model.window_size: found 8"));
  EXPECT_TRUE(refuses_latent("moe_router_enable_expert_bias=false",
                             "model.moe_router_enable_expert_bias: found false"));
  EXPECT_TRUE(refuses_latent("moe_router_topk=2",
                             "model.moe_router_topk: found 2, allowed in a DeepSeek-V3 model: 4"));
  EXPECT_TRUE(refuses_latent("moe_shared_expert_intermediate_size=33",
                             "found 33, allowed in a DeepSeek-V3 model: a multiple of "
                             "model.moe_ffn_hidden_size (16)"));
  EXPECT_TRUE(refuses("multi_latent_attention: true qk_layernorm: true layernorm_epsilon: 1e-6",
                      "model.num_experts: is not set"));
  EXPECT_TRUE(refuses_latent("moe_layer_freq=2", "layer 1 is dense but follows one with experts"));
  EXPECT_EQ(hugging_face_family(model("add_bias_linear: true")), HuggingFaceFamily::llama);
  for (const std::string other : {"window_size: 4", "qk_layernorm: true", "num_experts: 4"})
    EXPECT_TRUE(refuses("add_bias_linear: true " + other, "model.add_bias_linear: found true"));
  EXPECT_TRUE(refuses("activation: \"gelu\"", "model.activation: found gelu"));
  const std::string odd = "hidden_size: 48 num_attention_heads: 5 kv_channels: ";
  EXPECT_EQ(hugging_face_family(model(odd + "16")), HuggingFaceFamily::mistral);
  EXPECT_TRUE(refuses(odd + "16 add_bias_linear: true",
                      "model.add_bias_linear: found true, which needs a Llama model, whose "
                      "model.hidden_size (48) is a multiple of model.num_attention_heads (5)"));
  EXPECT_TRUE(refuses(odd + "9 position_embedding_type: \"learned_absolute\" activation: \"gelu\" "
                            "normalization: \"LayerNorm\" add_bias_linear: true",
                      "model.hidden_size: found 48, allowed in a GPT-2 model: 45"));
  EXPECT_TRUE(refuses("position_embedding_type: \"none\"", "allowed: learned_absolute"));
  EXPECT_TRUE(refuses("position_embedding_type: \"learned_absolute\"", "found RMSNorm"));
}

TEST(HuggingFaceConfig, ComesBack) {
  for (const char* const text :
       {"num_query_groups: 2 rotary_base: 5000 untie_embeddings_and_output_weights: true",
        "kv_channels: 16 layernorm_epsilon: 1e-6",
        "rope_scaling_type: \"linear\" rope_scaling_factor: 2.5",
        "rope_scaling_type: \"llama3\" rope_scaling_factor: 32 rope_low_freq_factor: 1.5 "
        "rope_high_freq_factor: 5 rope_original_max_position_embeddings: 64",
        "window_size: 8 num_query_groups: 2",
        "add_qkv_bias: true",
        "add_bias_linear: true",
        "add_qkv_bias: true window_size: 8",
        "qk_layernorm: true kv_channels: 16",
        "qk_layernorm: true window_size: 8",
        "num_experts: 4 moe_router_topk: 3 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_ffn_hidden_size: 24 window_size: 5",
        "num_experts: 4 qk_layernorm: true moe_router_pre_softmax: true num_layers: 3 "
        "moe_layer_freq: [0, 1, 1]",
        "rope_scaling_type: \"yarn\" rope_scaling_factor: 4 rope_beta_fast: 8 rope_beta_slow: 2 "
        "rope_original_max_position_embeddings: 64 qk_layernorm: true kv_channels: 16",
        "rope_scaling_type: \"yarn\" rope_mscale: 0 window_size: 8",
        kDeepSeekFields,
        kPlainDeepSeekFields,
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true ffn_hidden_size: 96",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu_tanh\" add_bias_linear: true",
        "position_embedding_type: \"learned_absolute\" normalization: \"LayerNorm\" "
        "activation: \"gelu\" add_bias_linear: true untie_embeddings_and_output_weights: true"}) {
    const Config config = parse_config("model { " + std::string(text) + " }", "test");
    const std::string json = format_hugging_face_config(config.model);
    Config found = config;
    found.model = parse_hugging_face_config(json, "config.json");
    EXPECT_EQ(print_config(found), print_config(config)) << json;
  }
}

TEST(EndsOfText, AreThatOfTheTokenizerAndThoseOfTheGenerationConfig) {
  const testing::TemporaryFolder folder;
  ByteTokenizer tokenizer;
  Config config;
  using Ids = std::set<int64_t>;
  EXPECT_EQ(ends_of_text(config, tokenizer), Ids{256});
  config.data.tokenizer = "hf:" + folder.path().string() + "/tokenizer.json";
  EXPECT_EQ(ends_of_text(config, tokenizer), Ids{256});
  for (const auto& [text, ids] :
       {std::pair("{}", Ids{256}), std::pair(R"({"eos_token_id": null})", Ids{256}),
        std::pair(R"({"eos_token_id": 7})", Ids{7, 256}),
        std::pair(R"({"eos_token_id": [9, 7]})", Ids{7, 9, 256})}) {
    folder.write("generation_config.json", text);
    EXPECT_EQ(ends_of_text(config, tokenizer), ids) << text;
  }
  for (const auto& [text, part] :
       {std::pair("{\n", "generation_config.json' is damaged: parse error at line 2"),
        std::pair("[]", "generation_config.json': found [], allowed: "),
        std::pair(R"({"eos_token_id": [-1]})", "eos_token_id[0]: found -1, allowed: ")}) {
    folder.write("generation_config.json", text);
    EXPECT_TRUE(throws_with<FileError>([&] { ends_of_text(config, tokenizer); }, part)) << text;
  }
}

TEST(HuggingFaceConfig, DamageIsNamed) {
  const auto refuses = [](const std::string& json, const std::string& part) {
    return throws_with<FileError>([&] { parse_hugging_face_config(json, "config.json"); }, part);
  };
  EXPECT_TRUE(refuses("{", "'config.json' is not a JSON object: parse error at line 1, column 2"));
  EXPECT_TRUE(refuses("[]", "'config.json' is not a JSON object"));
  EXPECT_TRUE(refuses("{}", "'model_type' is missing"));
  EXPECT_TRUE(refuses(R"({"model_type":"bert"})", "found bert, allowed: gpt2, llama"));
  for (const std::string name : {"relu", "gelu_fast", "quick_gelu", "swiglu"})
    EXPECT_TRUE(refuses(
        R"({"model_type":"gpt2","activation_function":")" + name + "\"}",
        "'activation_function': found " + name + ", allowed: gelu, gelu_new, gelu_pytorch_tanh"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","hidden_size":"x"})", "'num_hidden_layers'"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":"2"})",
                      "'num_hidden_layers': found \"2\", allowed: a whole number"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":0})", "found 0, allowed: >= 1"));
  EXPECT_TRUE(refuses(R"({"model_type":"llama","num_hidden_layers":1.5})",
                      "'num_hidden_layers': found 1.5, allowed: a whole number"));
  const std::string gpt2 =
      R"({"model_type":"gpt2","n_layer":2,"n_head":1,"n_positions":64,"vocab_size":256,"n_embd":)";
  EXPECT_TRUE(refuses(gpt2 + "2305843009213693952}",
                      "'config.json': model.hidden_size: found 2305843009213693952, allowed"));
  const std::string qwen =
      R"({"model_type":"qwen2","hidden_size":64,"intermediate_size":64,"num_hidden_layers":2,)"
      R"("num_attention_heads":4,"num_key_value_heads":4,"vocab_size":256,)"
      R"("max_position_embeddings":64,"use_sliding_window":true,"max_window_layers":)";
  for (const std::string number : {"1.5e+103", "-1e+30", "28.5", "9223372036854775808", "true"})
    EXPECT_TRUE(refuses(qwen + number + "}",
                        "'max_window_layers': found " + number + ", allowed: a whole number"));
  EXPECT_TRUE(refuses(R"({"model_type":"qwen3_moe","num_hidden_layers":2,"hidden_size":64,)"
                      R"("intermediate_size":64,"num_attention_heads":4,"vocab_size":256,)"
                      R"("num_key_value_heads":4,"max_position_embeddings":64,)"
                      R"("moe_intermediate_size":64,"num_experts":4,"num_experts_per_tok":2,)"
                      R"("mlp_only_layers":[0,1e300]})",
                      "'mlp_only_layers': found [0,1e+300], allowed: a list of whole numbers"));
}

TEST(MovedTokenizer, IsFoundBesideTheCheckpointOfItsImport) {
  const testing::TemporaryFolder folder;
  const std::string root = folder.path(), kept = root + "/moved/hugging_face";
  std::filesystem::create_directories(kept);
  for (const char* const name : {"/tokenizer.json", "/vocab.json", "/merges.txt"})
    std::ofstream(kept + name) << "{}";
  const std::string checkpoint = root + "/moved/step_0", gone = root + "/before";
  const std::string later = root + "/later/hugging_face";  // of an import to the old path
  std::filesystem::create_directories(later + "/tokenizer.json");
  for (const std::string& from : {checkpoint, checkpoint + "/../step_0"}) {
    for (const std::string& old : {later, gone + "/hugging_face"})
      EXPECT_EQ(find_moved_tokenizer("hf:" + old + "/tokenizer.json", from),
                "hf:" + kept + "/tokenizer.json");
    EXPECT_EQ(find_moved_tokenizer("gpt2:" + gone + "/hugging_face", from), "gpt2:" + kept);
  }
  for (const std::string& same :
       {std::string("byte"), "hf:" + gone + "/tokenizer.json", "gpt2:" + gone,
        "sentencepiece:" + gone + "/hugging_face/tokenizer.model", "hf:" + kept + "/tokenizer.json",
        "gpt2:" + kept})
    EXPECT_EQ(find_moved_tokenizer(same, checkpoint), same);
  const std::string lost = "gpt2:" + gone + "/hugging_face";
  EXPECT_EQ(find_moved_tokenizer(lost, root + "/step_0"), lost);
}

/// The folder of an import, and what a kill at some moment leaves for the next start.
class KilledImport : public ::testing::Test {
 protected:
  using Files = std::map<std::string, std::string>;

  static std::string manifest_of(int64_t samples) {
    Manifest manifest;
    manifest.consumed_samples = samples;
    return format_manifest(manifest);
  }

  void write(const std::string& into, const Files& files) const {
    std::filesystem::create_directories(folder_.path() / into);
    for (const auto& [name, text] : files) folder_.write(into + "/" + name, text);
  }

  /// The files beside the checkpoint if the process is killed now, `more` is done to what it
  /// leaves, and the next start cleans up.
  Files after_kill(
      const std::function<void(const std::filesystem::path& killed)>& more = {}) const {
    const testing::TemporaryFolder killed;
    std::filesystem::copy(folder_.path(), killed.path(), std::filesystem::copy_options::recursive);
    if (more) more(killed.path());
    EXPECT_EQ(remove_leftovers(killed.path()), "");
    Files files;
    for (const auto& entry : std::filesystem::directory_iterator(killed.path())) {
      const std::string name = entry.path().filename();
      EXPECT_FALSE(name.ends_with(".partial")) << name;
      if (name != "hugging_face") continue;
      for (const auto& file : std::filesystem::directory_iterator(entry.path())) {
        const std::string inside = file.path().filename();
        files[inside] = killed.read("hugging_face/" + inside);
      }
    }
    return files;
  }

  testing::TemporaryFolder folder_;
};

TEST_F(KilledImport, LeavesTheTokenizerOfTheWeightsThatAreThere) {
  const Files earlier = {{"tokenizer.json", "1"}, {"vocab.json", "1"}, {"notes", "a person's"}};
  const Files later = {{"tokenizer.json", "2"}, {"merges.txt", "2"}, {"notes", "a person's"}};
  const PartialCheckpoint partial(folder_.path(), 0);
  partial.begin();
  partial.commit(manifest_of(1));
  write("hugging_face", earlier);
  partial.begin();
  write("step_0.partial/companions", {{"tokenizer.json", "2"}, {"merges.txt", "2"}});
  EXPECT_EQ(after_kill(), earlier);
  KeptCompanions companions(partial.file("companions"), folder_.path());
  companions.put_in_place();
  EXPECT_EQ(after_kill(), earlier);
  EXPECT_EQ(after_kill([](const std::filesystem::path& killed) {
              std::filesystem::remove(killed / "hugging_face/tokenizer.json");
              std::filesystem::remove(killed / "hugging_face/merges.txt");
              std::filesystem::rename(killed / "step_0.companions.partial/vocab.json",
                                      killed / "hugging_face/vocab.json");
            }),
            earlier)
      << "only one of the files was moved";
  partial.commit(manifest_of(2));
  EXPECT_EQ(after_kill(), later);
  EXPECT_EQ(companions.keep(), "");
  EXPECT_EQ(after_kill(), later);
}

TEST_F(KilledImport, LeavesNoTokenizerWithoutWeights) {
  const PartialCheckpoint partial(folder_.path(), 0);
  partial.begin();
  write("step_0.partial/companions", {{"tokenizer.json", "1"}});
  KeptCompanions companions(partial.file("companions"), folder_.path());
  companions.put_in_place();
  EXPECT_TRUE(std::filesystem::exists(folder_.path() / "hugging_face/tokenizer.json"));
  EXPECT_EQ(after_kill(), Files());
}

}  // namespace
}  // namespace lockstep
