#include <gtest/gtest.h>

#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "lockstep/tests/checkpoint/exported_model.h"
#include "lockstep/tests/support/memory_counter.h"

namespace lockstep {
namespace {

using testing::kGpt2;
using testing::kLlama;

class HuggingFaceShards : public testing::ExportedModel {};

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

TEST_F(HuggingFaceShards, AWeightThatIsInfiniteInFp32IsNamed) {
  save(kLlama);
  const std::string out = export_as("out", {});
  const Tensors whole = load_all(out);
  const auto write = [&](double value) {
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const auto& [name, tensor] : whole) tensors.emplace_back(name, tensor.to(at::kDouble));
    tensors.back().second[3] = value;
    save_safetensors(out + "/model.safetensors", tensors);
    return tensors.back().first;
  };
  const std::string name = write(1e39);
  EXPECT_TRUE(refuses(out, "'" + out + "/model.safetensors': tensor '" + name +
                               "': found 1 of 32 elements that are not finite, allowed: none after "
                               "the conversion to fp32"));
  EXPECT_FALSE(std::filesystem::exists(folder_.path() / "back"));
  write(3e38);
  import_from_hugging_face(out, folder_.path() / "back");
}

TEST_F(HuggingFaceShards, AdaptersBesideAModelAreRefused) {
  save(kLlama);
  const std::string out = export_as("out", {});
  for (const char* const name : {"adapter_config.json", "adapter_model.safetensors"}) {
    folder_.write(std::string("out/") + name, "{}");
    for (const char* const path : {"", "/model.safetensors"})
      EXPECT_TRUE(refuses(out + path, std::string("--hf: found an ") + name + " in folder '" + out +
                                          "', allowed for a model: a folder without adapters, "
                                          "because transformers would add them to the weights; "
                                          "peft's merge_and_unload() merges them"));
    std::filesystem::remove(out + "/" + name);
  }
  import_from_hugging_face(out, folder_.path() / "back");
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

}  // namespace
}  // namespace lockstep
