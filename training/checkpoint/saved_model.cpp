#include "lockstep/training/checkpoint/saved_model.h"

#include <charconv>
#include <filesystem>
#include <fstream>
#include <optional>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/training/checkpoint/safetensors.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr const char* kWeights = "model.safetensors";
constexpr const char* kConfig = "config.textproto";
constexpr const char* kLatest = "latest";
constexpr std::string_view kStep = "step_";

bool is_step(const fs::path& folder) {
  return fs::is_regular_file(folder / kWeights) && fs::is_regular_file(folder / kConfig);
}

/// N of a folder name "step_N".
std::optional<int64_t> step_number(const std::string& name) {
  int64_t number = 0;
  if (!name.starts_with(kStep)) return {};
  const char* const end = name.data() + name.size();
  const auto [rest, error] = std::from_chars(name.data() + kStep.size(), end, number);
  if (error != std::errc() || rest != end) return {};
  return number;
}

fs::path newest_step(const std::string& folder) {
  if (is_step(folder)) return folder;
  require<FileError>(fs::is_directory(folder), "checkpoint: '{}' is no folder", folder);
  std::string latest;
  std::ifstream(fs::path(folder) / kLatest) >> latest;
  if (step_number(latest) && is_step(fs::path(folder) / latest)) return fs::path(folder) / latest;
  int64_t newest = -1;
  for (const auto& entry : fs::directory_iterator(folder))
    if (const auto number = step_number(entry.path().filename()); number && is_step(entry.path()))
      newest = std::max(newest, *number);
  require<FileError>(newest >= 0, "checkpoint: '{}' holds no complete step_N/ with {} and {}",
                     folder, kWeights, kConfig);
  return fs::path(folder) / fmt::format("{}{}", kStep, newest);
}

void replace_folder(const fs::path& from, const fs::path& to) {
  const fs::path old = to.string() + ".old";
  fs::remove_all(old);
  if (fs::exists(to)) fs::rename(to, old);
  fs::rename(from, to);
  fs::remove_all(old);
}

void load_weights(const GPTModel& model, const std::string& path) {
  const at::NoGradGuard no_grad;
  auto tensors = load_safetensors(path);
  for (const NamedParameter& param : collect_parameters(model)) {
    const auto found = tensors.find(param.name);
    require<FileError>(found != tensors.end(), "'{}': tensor '{}' is missing", path, param.name);
    require<FileError>(found->second.sizes() == param.tensor.sizes(),
                       "'{}': tensor '{}': found shape [{}], allowed: [{}]", path, param.name,
                       fmt::join(found->second.sizes(), ", "),
                       fmt::join(param.tensor.sizes(), ", "));
    at::Tensor(param.tensor).copy_(found->second);
    tensors.erase(found);
  }
  require<FileError>(tensors.empty(), "'{}': tensor '{}' belongs to no parameter of the model",
                     path, tensors.empty() ? "" : tensors.begin()->first);
}

}  // namespace

std::string save_model(const std::string& folder, int64_t iteration, const Config& config,
                       const GPTModel& model) {
  const fs::path root = folder;
  const std::string name = fmt::format("{}{}", kStep, iteration);
  const fs::path step = root / name, partial = root / (name + ".partial");
  try {
    fs::remove_all(partial);
    fs::create_directories(partial);
    std::vector<std::pair<std::string, at::Tensor>> tensors;
    for (const NamedParameter& param : collect_parameters(model))
      tensors.emplace_back(param.name, param.tensor);
    save_safetensors(partial / kWeights, tensors, {{"format", "pt"}});
    write_file(partial / kConfig, {print_config(config)});
    replace_folder(partial, step);
    write_file(root / (std::string(kLatest) + ".partial"), {name + "\n"});
    fs::rename(root / (std::string(kLatest) + ".partial"), root / kLatest);
  } catch (const fs::filesystem_error& error) {
    fail<FileError>("checkpoint.save: '{}' cannot be written: {}", step.string(), error.what());
  }
  return step;
}

SavedModel load_model(const std::string& folder, c10::Device device) {
  const fs::path step = newest_step(folder);
  Config config;
  try {
    config = load_config(step / kConfig);
  } catch (const ConfigError& error) {
    fail<FileError>("checkpoint: {}", error.what());
  }
  auto model =
      std::make_shared<GPTModel>(config.model, GPTModelOptions{at::kFloat, device, /*seed=*/0});
  load_weights(*model, step / kWeights);
  return {config, model, step};
}

}  // namespace lockstep
