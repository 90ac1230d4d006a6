#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <string>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {

inline constexpr const char* kLlama =
    "num_query_groups: 2 num_attention_heads: 4 "
    "untie_embeddings_and_output_weights: true";
inline constexpr const char* kGpt2 =
    "num_attention_heads: 4 position_embedding_type: \"learned_absolute\" "
    "normalization: \"LayerNorm\" activation: \"gelu_tanh\" add_bias_linear: true";

/// One of our models in a checkpoint, and its exports.
class ExportedModel : public ::testing::Test {
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

  using Tensors = std::map<std::string, at::Tensor>;

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

  TemporaryFolder folder_;
  Config config_;
  const std::string ours_ = folder_.path() / "ours";
};

}  // namespace lockstep::testing
