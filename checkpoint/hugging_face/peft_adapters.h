#pragma once

// Internal.

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/checkpoint/saved_weights.h"

/// Adapters in the file format of Hugging Face's peft, which PeftModel.from_pretrained() loads on
/// top of the model that they were trained on.
namespace lockstep {

inline constexpr const char* kAdapterWeightsFile = "adapter_model.safetensors";
inline constexpr const char* kAdapterConfigFile = "adapter_config.json";

/// Whether there is anything of that name in the folder. FileError if that cannot be determined.
bool is_in_folder(const std::string& folder, const char* name);

/// FileError, which ends with `remedy`, if the folder holds files of peft's beside a model, or
/// where one is to be: transformers adds such adapters to the weights.
void check_without_adapters(const std::string& folder, const std::string& remedy);

/// What the files hold.
struct PeftAdapters {
  std::vector<std::pair<std::string, at::Tensor>> tensors;  ///< of adapter_model.safetensors
  std::string config;                                       ///< text of adapter_config.json
};

/// The adapters of a checkpoint with `config`, for one process. The layers of queries, keys and
/// values, and likewise a gate and its inner matrix, are one layer here and share one A: each layer
/// in transformers gets a copy of it and its own rows of B. ConfigError: the checkpoint has no
/// adapters, or as for hugging_face_family().
PeftAdapters peft_adapters(const Config& config, const SavedWeights& weights, at::ScalarType dtype);

}  // namespace lockstep
