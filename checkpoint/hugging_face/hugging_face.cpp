#include "lockstep/checkpoint/hugging_face.h"

#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/export_folder.h"
#include "lockstep/checkpoint/finite_values.h"
#include "lockstep/checkpoint/hugging_face_config.h"
#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kLongestJson = int64_t{64} << 20;
constexpr const char* kConfigFile = "config.json";
constexpr const char* kWeightsFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

/// Where transformers keeps models that it has fetched, every file is a link.
std::string read_json(const std::string& path) {
  return read_file(path, kLongestJson, /*follow_links=*/true);
}

/// Values without padding.
NamedTensors weights_of(const GPTModel& model) {
  NamedTensors weights;
  for (const NamedParameter& param : collect_parameters(model)) {
    at::Tensor tensor = param.tensor.detach().cpu().to(at::kFloat);
    const auto& rows = param.description.unpadded_rows;
    weights[param.name] = rows ? tensor.narrow(0, 0, *rows) : tensor;
  }
  return weights;
}

/// Before a model of that size takes memory.
void check_shapes(const Config& config, const NamedTensors& weights, const std::string& path) {
  const ModelChunk whole = {
      .num_layers = config.model.num_layers, .has_embedding = true, .has_output = true};
  for (const ShapedParameter& param : chunk_parameters(config, whole)) {
    std::vector<int64_t> rows_and_columns = param.shape;
    if (const auto& rows = param.description.unpadded_rows) rows_and_columns.front() = *rows;
    // A gate and its inner matrix, and experts, are one below the other there.
    if (param.shape.size() > 2)
      rows_and_columns = {param.numel() / param.shape.back(), param.shape.back()};
    const at::Tensor& found = weights.at(param.name);
    require<FileError>(found.sizes() == at::IntArrayRef(rows_and_columns),
                       "'{}': weight '{}': found shape [{}], allowed: [{}]", path, param.name,
                       fmt::join(found.sizes(), ", "), fmt::join(rows_and_columns, ", "));
  }
}

/// What the weights do not tell is the length of the table of rotary angles.
std::unique_ptr<GPTModel> make_model(const TransformerConfig& config, const std::string& path) {
  try {
    return std::make_unique<GPTModel>(config);
  } catch (const c10::Error& error) {
    fail<FileError>("'{}': a model of {} positions cannot be made: {}", path, config.seq_length,
                    error.what_without_backtrace());
  }
}

void set_weights(const GPTModel& model, const NamedTensors& weights) {
  const at::NoGradGuard no_grad;
  for (const NamedParameter& param : collect_parameters(model)) {
    const at::Tensor& source = weights.at(param.name);
    const auto& rows = param.description.unpadded_rows;
    const at::Tensor target = rows ? param.tensor.narrow(0, 0, *rows) : param.tensor;
    at::Tensor(target).copy_(source.view(target.sizes()));
  }
}

NamedTensors read_all_weights(const fs::path& in) {
  const auto is_there = [&](const char* name) { return kind_of_file(in / name) != FileKind::none; };
  if (!is_there(kIndexFile) || is_there(kWeightsFile)) return load_safetensors(in / kWeightsFile);
  const std::string path = in / kIndexFile;
  const auto json = nlohmann::json::parse(read_json(path), nullptr, /*allow_exceptions=*/false);
  std::set<std::string> files;
  try {
    for (const auto& [name, file] : json.at("weight_map").items()) files.insert(file);
  } catch (const nlohmann::json::exception& error) {
    fail<FileError>("'{}': 'weight_map': {}", path, error.what());
  }
  NamedTensors tensors;
  for (const std::string& file : files) {
    const bool plain = !file.empty() && file != "." && file != "..";
    require<FileError>(plain && fs::path(file).filename() == file,
                       "'{}': file '{}' is outside the folder", path, file);
    NamedTensors more = load_safetensors(in / file);
    tensors.merge(more);
    require<FileError>(more.empty(), "'{}': tensor '{}' is in another file too",
                       (in / file).string(), more.empty() ? "" : more.begin()->first);
  }
  return tensors;
}

NamedTensors read_finite_weights(const fs::path& in) {
  NamedTensors tensors = read_all_weights(in);
  for (const auto& [name, tensor] : tensors) {
    const int64_t count = count_not_finite(tensor);
    require<FileError>(count == 0, "'{}': {}", in.string(),
                       describe_not_finite(name, count, tensor.numel()));
  }
  return tensors;
}

}  // namespace

std::string export_to_hugging_face(const std::string& folder, const std::string& out) {
  const SavedModel saved = load_model(folder, c10::kCPU);
  const TransformerConfig& model = saved.model->config();
  const std::string config = format_hugging_face_config(model);
  ExportFolder files(out, {kWeightsFile, kConfigFile}, "--hf");
  std::vector<std::pair<std::string, at::Tensor>> tensors;
  for (const auto& [name, tensor] : to_hugging_face(model, weights_of(*saved.model)))
    tensors.emplace_back(name, tensor);
  save_safetensors(files.file(kWeightsFile), tensors, {{"format", "pt"}});
  write_file(files.file(kConfigFile), {config});
  return files.publish();
}

std::string import_from_hugging_face(const std::string& in, const std::string& folder) {
  const std::string path = fs::path(in) / kConfigFile;
  Config config;
  config.model = parse_hugging_face_config(read_json(path), path);
  config = resolve(config);
  const std::string file = fs::path(in) / kWeightsFile;
  const NamedTensors weights = from_hugging_face(config.model, read_finite_weights(in), file);
  check_shapes(config, weights, file);
  const auto model = make_model(config.model, path);
  set_weights(*model, weights);
  return save_model(folder, 0, config, *model);
}

}  // namespace lockstep
