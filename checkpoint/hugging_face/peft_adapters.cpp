#include "lockstep/checkpoint/peft_adapters.h"

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/hugging_face_families.h"
#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/checkpoint/whole_model.h"
#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

/// "q_proj" of "model.layers.0.self_attn.q_proj"; for GPT-2, whose attention and MLP both have a
/// "c_proj", "attn.c_proj".
std::string target_of(const std::string& module, HuggingFaceFamily family) {
  size_t dot = module.rfind('.');
  if (family == HuggingFaceFamily::gpt2) dot = module.rfind('.', dot - 1);
  return module.substr(dot + 1);
}

std::string format_config(const Config& config, const std::set<std::string>& modules) {
  const LoraConfig& lora = config.lora;
  nlohmann::ordered_json json = {
      {"peft_type", "LORA"},
      {"task_type", "CAUSAL_LM"},
      {"base_model_name_or_path", nullptr},
      {"inference_mode", true},
      {"r", lora.rank.value()},
      {"lora_alpha", lora.alpha},
      {"lora_dropout", lora.dropout},
      {"target_modules", modules},
      {"bias", "none"},
      // transformers' GPT-2 has Conv1D layers, whose weights are [in, out].
      {"fan_in_fan_out", hugging_face_family(config.model) == HuggingFaceFamily::gpt2}};
  if (std::floor(lora.alpha) == lora.alpha && lora.alpha < 0x1p53)
    json["lora_alpha"] = static_cast<int64_t>(lora.alpha);
  return json.dump(2) + "\n";
}

}  // namespace

bool is_in_folder(const std::string& folder, const char* name) {
  return kind_of_file(std::filesystem::path(folder) / name) != FileKind::none;
}

void check_without_adapters(const std::string& folder, const std::string& remedy) {
  for (const char* const name : {kAdapterConfigFile, kAdapterWeightsFile})
    require<FileError>(!is_in_folder(folder, name),
                       "--hf: found an {} in folder '{}', allowed for a model: a folder without "
                       "adapters, because transformers would add them to the weights{}",
                       name, folder, remedy);
}

PeftAdapters peft_adapters(const Config& config, const SavedWeights& weights,
                           at::ScalarType dtype) {
  const std::vector<AdaptedLinear> linears = whole_adapters(config);
  require<ConfigError>(!linears.empty(),
                       "--adapters: found a checkpoint without adapters (lora.rank is unset), "
                       "allowed: one with adapters");
  PeftAdapters adapters;
  std::set<std::string> modules;
  for (const AdaptedLinear& linear : linears) {
    const at::Tensor a = weights.read_alone(linear.a).to(dtype);
    const at::Tensor b = weights.read_alone(linear.b).to(dtype);
    for (const auto& [module, rows] : linears_in_hugging_face(config.model, linear.weight, b)) {
      const std::string prefix = "base_model.model." + module;
      adapters.tensors.emplace_back(prefix + ".lora_A.weight", a);
      adapters.tensors.emplace_back(prefix + ".lora_B.weight", rows);
      modules.insert(target_of(module, hugging_face_family(config.model)));
    }
  }
  adapters.config = format_config(config, modules);
  return adapters;
}

}  // namespace lockstep
