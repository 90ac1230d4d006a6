#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Tensors = std::map<std::string, at::Tensor>;

constexpr const char* kLlama =
    "num_query_groups: 2 num_attention_heads: 4 "
    "untie_embeddings_and_output_weights: true";
constexpr const char* kGpt2 =
    "num_attention_heads: 4 position_embedding_type: \"learned_absolute\" "
    "normalization: \"LayerNorm\" activation: \"gelu_tanh\" add_bias_linear: true";

/// GPT-2's vocab.json with one token per byte.
std::string vocabulary_of_bytes() {
  nlohmann::json json;
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool itself = (byte > 32 && byte < 127) || (byte > 160 && byte != 173);
    const int character = itself ? byte : next++;
    json[character < 128 ? std::string(1, static_cast<char>(character))
                         : std::string{static_cast<char>(0xc0 | character >> 6),
                                       static_cast<char>(0x80 | (character & 0x3f))}] = byte;
  }
  return json.dump();
}

/// One of our models in a checkpoint, and its exports.
class HuggingFaceShards : public ::testing::Test {
 protected:
  void save(const std::string& family,
            const std::string& sizes = "num_layers: 2 hidden_size: 32 ffn_hidden_size: 48") {
    config_ = parse_config("model { seq_length: 16 vocab_size: 40 " + sizes + " " + family + " }",
                           "test");
    std::filesystem::remove_all(ours_);
    save_model(ours_, 0, config_, GPTModel(config_.model));
  }

  std::string export_as(const std::string& name, const ExportOptions& options) const {
    const std::string out = folder_.path() / name;
    EXPECT_EQ(export_to_hugging_face(ours_, out, options), "");
    return out;
  }

  static Tensors load_all(const std::string& folder) {
    Tensors tensors;
    for (const auto& entry : std::filesystem::directory_iterator(folder))
      if (entry.path().extension() == ".safetensors") {
        const Tensors some = load_safetensors(entry.path());
        tensors.insert(some.begin(), some.end());
      }
    return tensors;
  }

  ::testing::AssertionResult refuses(const std::string& in, const std::string& part) const {
    return throws_with<FileError>([&] { import_from_hugging_face(in, folder_.path() / "back"); },
                                  part);
  }

  at::Tensor logits(const std::string& folder) const {
    return load_model(folder, c10::kCPU).model->forward(at::arange(12).unsqueeze(0));
  }

  testing::TemporaryFolder folder_;
  Config config_;
  const std::string ours_ = folder_.path() / "ours";
};

TEST_F(HuggingFaceShards, HoldWhatOneFileHolds) {
  for (const char* const family : {kLlama, kGpt2}) {
    save(family);
    const std::string one = export_as("one", {});
    const std::string shards = export_as("shards", {.max_shard_size = 9000});
    const Tensors expected = load_all(one), found = load_all(shards);
    EXPECT_GE(std::distance(std::filesystem::directory_iterator(shards), {}), 6);
    ASSERT_EQ(found.size(), expected.size());
    int64_t bytes = 0;
    for (const auto& [name, tensor] : expected) {
      EXPECT_TRUE(at::equal(found.at(name), tensor)) << name;
      bytes += static_cast<int64_t>(tensor.nbytes());
    }
    const auto index = nlohmann::json::parse(folder_.read("shards/model.safetensors.index.json"));
    EXPECT_EQ(index["metadata"]["total_size"], bytes);
    for (const auto& [name, file] : index["weight_map"].items())
      EXPECT_TRUE(load_safetensors(shards + "/" + file.get<std::string>()).contains(name));
    const std::string back = folder_.path() / "sharded back";
    import_from_hugging_face(shards, back);
    EXPECT_TRUE(at::equal(logits(back), logits(ours_)));
    std::filesystem::remove_all(back);
  }
}

TEST_F(HuggingFaceShards, InBfloat16AreTheRoundedWeights) {
  save(kLlama);
  const Tensors wide = load_all(export_as("wide", {}));
  const Tensors narrow = load_all(export_as("narrow", {.dtype = ExportDtype::bf16}));
  for (const auto& [name, tensor] : wide)
    EXPECT_TRUE(at::equal(narrow.at(name), tensor.to(at::kBFloat16))) << name;
  EXPECT_EQ(nlohmann::json::parse(folder_.read("narrow/config.json"))["torch_dtype"], "bfloat16");
  EXPECT_EQ(nlohmann::json::parse(folder_.read("wide/config.json"))["torch_dtype"], "float32");
  import_from_hugging_face(folder_.path() / "narrow", folder_.path() / "back");
  export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
  const Tensors again = load_all(folder_.path() / "again");
  for (const auto& [name, tensor] : narrow)
    EXPECT_TRUE(at::equal(again.at(name), tensor.to(at::kFloat))) << name;
}

TEST_F(HuggingFaceShards, AreReadInAnyFloatingPointDtype) {
  save(kLlama);
  const std::string out = export_as("out", {});
  const Tensors whole = load_all(out);
  for (const at::ScalarType dtype : {at::kDouble, at::kHalf, at::kBFloat16}) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& [name, tensor] : whole) tensors.emplace_back(name, tensor.to(dtype));
    save_safetensors(out + "/model.safetensors", tensors);
    std::filesystem::remove_all(folder_.path() / "back");
    import_from_hugging_face(out, folder_.path() / "back");
    export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
    const Tensors again = load_all(folder_.path() / "again");
    for (const auto& [name, tensor] : whole)
      EXPECT_TRUE(at::equal(again.at(name), tensor.to(dtype).to(at::kFloat))) << name;
  }
}

TEST_F(HuggingFaceShards, DamageIsNamed) {
  save(kLlama);
  const std::string out = export_as("out", {.max_shard_size = 9000});
  const std::string index_path = out + "/model.safetensors.index.json";
  const auto index = nlohmann::json::parse(folder_.read("out/model.safetensors.index.json"));
  const auto write_index = [&](const nlohmann::json& json) {
    folder_.write("out/model.safetensors.index.json", json.dump());
  };
  const std::string name = "model.norm.weight", file = index["weight_map"][name];

  nlohmann::json damaged = index;
  damaged["weight_map"]["odd.weight"] = file;
  write_index(damaged);
  EXPECT_TRUE(refuses(out, "'" + out + "/" + file + "': tensor 'odd.weight' is missing, but '" +
                               index_path + "' lists it"));
  damaged = index;
  damaged["weight_map"][name] = "../out/" + file;
  write_index(damaged);
  EXPECT_TRUE(refuses(out, "'" + index_path + "': tensor '" + name + "': file '../out/" + file +
                               "' is outside the folder"));
  damaged = index;
  damaged["weight_map"][name] = "gone.safetensors";
  write_index(damaged);
  EXPECT_TRUE(refuses(out, "gone.safetensors' cannot be read: No such file"));
  damaged = index;
  for (auto& [tensor, shard] : damaged["weight_map"].items())
    if (shard != file) {
      shard = file;
      break;
    }
  write_index(damaged);
  EXPECT_TRUE(refuses(out, "' is missing, but '"));
  write_index(index);
  std::filesystem::copy(out + "/" + file, out + "/copy.safetensors");
  damaged = index;
  damaged["weight_map"][name] = "copy.safetensors";
  write_index(damaged);
  EXPECT_TRUE(refuses(out, "' is in another file too"));
  write_index(index);
  std::filesystem::resize_file(out + "/" + file, std::filesystem::file_size(out + "/" + file) - 1);
  EXPECT_TRUE(refuses(out, "'" + out + "/" + file + "': the tensors end at byte"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "back"));
}

TEST_F(HuggingFaceShards, ALongTableOfPositionsIsCut) {
  for (const char* const family : {kLlama, kGpt2}) {
    save(family);
    const std::string out = export_as("out", {});
    const std::string shorter = folder_.path() / "shorter", longer = folder_.path() / "longer";
    import_from_hugging_face(out, shorter, 12);
    import_from_hugging_face(out, longer, 1000);
    EXPECT_EQ(load_model(shorter, c10::kCPU).config.model.seq_length, 12);
    EXPECT_EQ(load_model(longer, c10::kCPU).config.model.seq_length, 16);
    EXPECT_TRUE(at::equal(logits(shorter), logits(ours_)));
    std::filesystem::remove_all(shorter);
    std::filesystem::remove_all(longer);
  }
}

// The model has 12 layers and two tables. The peak is two of the largest tensors, plus what a
// reader needs.
TEST_F(HuggingFaceShards, TakeMemoryOfTwoOfTheLargestTensors) {
  for (const char* const family : {kLlama, kGpt2}) {
    save(family, "num_layers: 12 hidden_size: 64 ffn_hidden_size: 256");
    for (const ExportDtype dtype : {ExportDtype::fp32, ExportDtype::bf16}) {
      const std::string out = folder_.path() / "out", back = folder_.path() / "back";
      int64_t peak_of_export = 0, peak_of_import = 0;
      {
        const testing::MemoryCounter memory;
        export_to_hugging_face(ours_, out, {.dtype = dtype, .max_shard_size = 200'000});
        peak_of_export = memory.peak();
      }
      {
        const testing::MemoryCounter memory;
        import_from_hugging_face(out, back);
        peak_of_import = memory.peak();
      }
      int64_t largest = 0, all = 0;
      for (const auto& [name, tensor] : load_all(out)) {
        largest = std::max(largest, tensor.numel() * int64_t{sizeof(float)});
        all += tensor.numel() * int64_t{sizeof(float)};
      }
      // A fused weight, together with its parts, is larger than any part.
      const int64_t fused = 2 * 256 * 64 * int64_t{sizeof(float)};
      EXPECT_GT(all, 8 * fused);
      EXPECT_GT(peak_of_export, 0);
      EXPECT_LE(peak_of_export, 2 * std::max(largest, fused) + 4096);
      EXPECT_LE(peak_of_import, 2 * std::max(largest, fused) + 4096);
      std::filesystem::remove_all(back);
      std::filesystem::remove_all(out);
    }
  }
}

TEST_F(HuggingFaceShards, BringTheTokenizerAlong) {
  save(kGpt2);
  const std::string out = export_as("out", {});
  EXPECT_EQ(nlohmann::json::parse(folder_.read("out/generation_config.json")),
            nlohmann::json({{"_from_model_config", true}}));
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "{\"temperature\": 0.6}");
  const std::string back = folder_.path() / "back";
  EXPECT_EQ(import_from_hugging_face(out, back).note, "");
  EXPECT_EQ(load_model(back, c10::kCPU).config.data.tokenizer, "gpt2:" + back + "/hugging_face");
  std::filesystem::remove_all(out);
  EXPECT_EQ(export_to_hugging_face(back, folder_.path() / "again"), "");
  for (const char* const name : {"vocab.json", "merges.txt", "generation_config.json"})
    EXPECT_EQ(folder_.read(std::string("again/") + name),
              folder_.read(std::string("back/hugging_face/") + name))
        << name;
  EXPECT_EQ(folder_.read("again/generation_config.json"), "{\"temperature\": 0.6}");
  std::filesystem::remove_all(back + "/hugging_face");
  EXPECT_NE(export_to_hugging_face(back, folder_.path() / "without")
                .find("the tokenizer 'gpt2:" + back + "/hugging_face' is left out: "),
            std::string::npos);
}

TEST_F(HuggingFaceShards, DoNotTakeTiktokensRanksAlongAndSaySo) {
  constexpr const char* kBase64 =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string ranks;  // of one token per byte
  for (int byte = 0; byte < 256; ++byte)
    ranks += std::string{kBase64[byte >> 2], kBase64[(byte & 3) << 4]} +
             "== " + std::to_string(byte) + "\n";
  const std::string tokenizer = "gpt2:" + folder_.path().string();
  folder_.write("r50k_base.tiktoken", ranks);
  save(kGpt2);
  config_.data.tokenizer = tokenizer;
  save_model(ours_, 1, config_, GPTModel(config_.model));
  EXPECT_EQ(export_to_hugging_face(ours_, folder_.path() / "out", {}),
            "the tokenizer '" + tokenizer +
                "' is left out: it consists of tiktoken's ranks, allowed: vocab.json and "
                "merges.txt, or encoder.json and vocab.bpe");
  folder_.write("vocab.json", vocabulary_of_bytes());
  folder_.write("merges.txt", "#version: 0.2\n");
  EXPECT_EQ(export_to_hugging_face(ours_, folder_.path() / "complete", {}), "");
}

TEST_F(HuggingFaceShards, AFailedImportLeavesTheTokenizerOfTheOneBefore) {
  save(kGpt2);
  const std::string out = export_as("out", {}), back = folder_.path() / "back";
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "first");
  import_from_hugging_face(out, back);
  folder_.write("out/generation_config.json", "second");
  std::filesystem::remove(out + "/vocab.json");
  const Tensors whole = load_all(out);
  std::vector<std::pair<std::string, at::Tensor>> tensors(whole.begin(), whole.end());
  const at::Tensor good = tensors.back().second;
  tensors.back().second = at::full_like(good, std::numeric_limits<double>::quiet_NaN());
  save_safetensors(out + "/model.safetensors", tensors);
  EXPECT_TRUE(refuses(out, "not finite"));
  EXPECT_EQ(folder_.read("back/hugging_face/generation_config.json"), "first");
  EXPECT_EQ(folder_.read("back/hugging_face/vocab.json"), vocabulary_of_bytes());
  EXPECT_FALSE(std::filesystem::exists(back + "/step_0.partial"));
  tensors.back().second = good;
  save_safetensors(out + "/model.safetensors", tensors);
  import_from_hugging_face(out, back);
  EXPECT_EQ(folder_.read("back/hugging_face/generation_config.json"), "second");
  EXPECT_FALSE(std::filesystem::exists(back + "/hugging_face/vocab.json"));
  EXPECT_FALSE(std::filesystem::exists(back + "/step_0/companions"));
}

TEST_F(HuggingFaceShards, AnImportThatCannotBecomeCompleteLeavesTheTokenizerOfTheOneBefore) {
  save(kGpt2);
  const std::string out = export_as("out", {}), back = folder_.path() / "back";
  const auto kept = [&] {
    std::map<std::string, std::string> files;
    for (const auto& entry : std::filesystem::directory_iterator(back + "/hugging_face"))
      files[entry.path().filename()] =
          folder_.read("back/hugging_face/" + entry.path().filename().string());
    return files;
  };
  folder_.write("out/vocab.json", vocabulary_of_bytes());
  folder_.write("out/merges.txt", "#version: 0.2\n");
  folder_.write("out/generation_config.json", "first");
  import_from_hugging_face(out, back);
  folder_.write("back/hugging_face/notes", "a person's");
  const auto before = kept();
  EXPECT_EQ(before.size(), 4u);
  folder_.write("out/generation_config.json", "second");
  folder_.write("out/special_tokens_map.json", "only in the second");
  std::filesystem::remove(out + "/vocab.json");
  std::filesystem::remove(back + "/latest");
  std::filesystem::create_directory(back + "/latest");
  EXPECT_TRUE(refuses(out, "/latest': found no regular file"));
  EXPECT_EQ(kept(), before);
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(back), {}), 3);
  std::filesystem::remove(back + "/latest");
  EXPECT_EQ(load_model(back, c10::kCPU).config.data.tokenizer, "gpt2:" + back + "/hugging_face");
  import_from_hugging_face(out, back);
  EXPECT_EQ(kept(), (std::map<std::string, std::string>{
                        {"generation_config.json", "second"},
                        {"merges.txt", "#version: 0.2\n"},
                        {"notes", "a person's"},
                        {"special_tokens_map.json", "only in the second"}}));
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(back), {}), 3);
}

TEST_F(HuggingFaceShards, ATokenizerThatCannotBeReadIsToldOf) {
  save(kGpt2);
  const std::string out = export_as("out", {});
  folder_.write("out/vocab.json", "{}");
  folder_.write("out/merges.txt", "damaged");
  const ImportedModel model = import_from_hugging_face(out, folder_.path() / "back");
  EXPECT_EQ(model.note.find("data.tokenizer is byte: '" + out + "/"), 0u) << model.note;
  EXPECT_EQ(load_model(folder_.path() / "back", c10::kCPU).config.data.tokenizer, "byte");
  // Its files come along nevertheless.
  export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
  EXPECT_EQ(folder_.read("again/merges.txt"), "damaged");
  save(kLlama);
  const std::string llama = export_as("llama", {});
  folder_.write("llama/vocab.json", vocabulary_of_bytes());
  folder_.write("llama/merges.txt", "#version: 0.2\n");
  EXPECT_EQ(import_from_hugging_face(llama, folder_.path() / "llama back").note,
            "data.tokenizer is byte: '" + llama +
                "': found vocab.json and merges.txt, allowed for another model than GPT-2: "
                "tokenizer.json or tokenizer.model");
}

TEST_F(HuggingFaceShards, NameAnEndOfTextThatTheModelHas) {
  const auto generation = [&](const std::string& name) {
    return nlohmann::json::parse(folder_.read(name + "/generation_config.json"));
  };
  for (const auto& [size, has_end] : {std::pair(257, true), {320, false}, {256, false}}) {
    save(kLlama);
    config_.model.vocab_size = size;
    save_model(ours_, 1, config_, GPTModel(config_.model));
    export_as("out", {});
    EXPECT_EQ(generation("out").contains("eos_token_id"), has_end) << size;
  }
  // Without a generation_config.json, those of config.json count.
  std::filesystem::remove(folder_.path() / "out/generation_config.json");
  auto json = nlohmann::json::parse(folder_.read("out/config.json"));
  json.update({{"bos_token_id", 1}, {"eos_token_id", {2, 7}}});
  folder_.write("out/config.json", json.dump());
  import_from_hugging_face(folder_.path() / "out", folder_.path() / "back");
  export_to_hugging_face(folder_.path() / "back", folder_.path() / "again");
  EXPECT_EQ(generation("again"),
            nlohmann::json(
                {{"_from_model_config", true}, {"bos_token_id", 1}, {"eos_token_id", {2, 7}}}));
}

TEST_F(HuggingFaceShards, LeaveNoTokenizerOfAnEarlierExport) {
  save(kLlama);
  const std::string out = export_as("out", {});
  for (const char* const name : {"chat_template.jinja", "notes"})
    folder_.write(std::string("out/") + name, "{}");
  export_as("out", {});
  EXPECT_FALSE(std::filesystem::exists(out + "/chat_template.jinja"));
  EXPECT_TRUE(std::filesystem::exists(out + "/notes"));
}

}  // namespace
}  // namespace lockstep
