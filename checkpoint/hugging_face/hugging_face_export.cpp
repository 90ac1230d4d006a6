#include <memory>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/companion_files.h"
#include "lockstep/checkpoint/export_folder.h"
#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/hugging_face_config.h"
#include "lockstep/checkpoint/hugging_face_weights.h"
#include "lockstep/checkpoint/moved_tokenizer.h"
#include "lockstep/checkpoint/peft_adapters.h"
#include "lockstep/checkpoint/safetensors.h"
#include "lockstep/checkpoint/saved_weights.h"
#include "lockstep/checkpoint/sharded_safetensors.h"
#include "lockstep/checkpoint/step_folders.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/checkpoint/whole_model.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"

namespace lockstep {
namespace {

constexpr int64_t kLongestTokenizer = int64_t{1} << 30;

at::ScalarType scalar_type_of(ExportDtype dtype) {
  return dtype == ExportDtype::bf16 ? at::kBFloat16 : at::kFloat;
}

/// Checks the shapes in the checkpoint against those of its model.
void check_saved_shapes(const CheckpointReader& checkpoint, const Config& config) {
  std::set<std::string> names;
  for (const WholeParameter& param : whole_parameters(config)) {
    const ManifestTensor* const found = checkpoint.find(param.name);
    require<FileError>(found != nullptr, "'{}': tensor '{}' is missing", checkpoint.path(),
                       param.name);
    require<FileError>(found->shape == param.shape,
                       "'{}': tensor '{}': found shape [{}], allowed: [{}]", checkpoint.path(),
                       param.name, fmt::join(found->shape, ", "), fmt::join(param.shape, ", "));
    names.insert(param.name);
  }
  for (const ManifestTensor& tensor : checkpoint.manifest().tensors)
    require<FileError>(names.contains(tensor.name),
                       "'{}': tensor '{}' belongs to no parameter of the model", checkpoint.path(),
                       tensor.name);
}

/// The tensors to write, in order.
std::vector<SafetensorsEntry> exported_tensors(const Config& config, CheckpointReader& checkpoint,
                                               at::ScalarType dtype) {
  std::vector<SafetensorsEntry> tensors;
  to_hugging_face(config.model, SavedWeights(checkpoint, config, dtype, /*meta=*/true),
                  [&](const std::string& name, const at::Tensor& tensor) {
                    tensors.push_back({.name = name,
                                       .dtype = safetensors_dtype(tensor.scalar_type()),
                                       .shape = tensor.sizes().vec()});
                  });
  return tensors;
}

std::string export_adapters(CheckpointReader& checkpoint, const Config& config,
                            const std::string& out, at::ScalarType dtype) {
  require<FileError>(!is_in_folder(out, kConfigFile),
                     "--hf: found a {} in folder '{}', allowed with --adapters: a folder without "
                     "one, because transformers would add the adapters to the weights there",
                     kConfigFile, out);
  check_saved_shapes(checkpoint, config);
  const PeftAdapters adapters =
      peft_adapters(config, SavedWeights(checkpoint, config, dtype, /*meta=*/false), dtype);
  ExportFolder files(out, {kAdapterWeightsFile, kAdapterConfigFile}, "--hf");
  save_safetensors(files.file(kAdapterWeightsFile), adapters.tensors, {{"format", "pt"}});
  write_file(files.file(kAdapterConfigFile), {adapters.config});
  return files.publish();
}

std::string export_checkpoint(CheckpointReader& checkpoint, const std::string& out,
                              const ExportOptions& options) {
  const at::NoGradGuard no_grad;
  Config config = whole_config(checkpoint.config());
  config.data.tokenizer = find_moved_tokenizer(config.data.tokenizer, checkpoint.path());
  const at::ScalarType dtype = scalar_type_of(options.dtype);
  if (options.adapters) return export_adapters(checkpoint, config, out, dtype);
  check_without_adapters(out, "");
  const std::string config_json = format_hugging_face_config(
      config.model, options.dtype == ExportDtype::bf16 ? "bfloat16" : "float32");
  check_saved_shapes(checkpoint, config);
  ShardedSafetensors weights(exported_tensors(config, checkpoint, dtype), options.max_shard_size);
  const Companions companions = find_companions(config, checkpoint.path());

  std::vector<std::string> names = weights.file_names();
  for (const auto& [name, original] : companions.files) names.push_back(name);
  for (const auto& [name, text] : companions.texts) names.push_back(name);
  names.emplace_back(kConfigFile);
  // Next to a config.json the tokenizer's files are those of a model that was there.
  const bool is_model = is_in_folder(out, kConfigFile);
  ExportFolder files(out, names, "--hf", [is_model](const std::string& name) {
    return is_weights_file(name) || (is_model && is_companion_file(name));
  });
  const auto path_of = [&files](const std::string& name) { return files.file(name); };
  to_hugging_face(config.model, SavedWeights(checkpoint, config, dtype, /*meta=*/false),
                  [&](const std::string& /*name*/, const at::Tensor& tensor) {
                    weights.write(bytes_of(tensor), path_of);
                  });
  weights.finish(path_of);
  for (const auto& [name, original] : companions.files)
    write_file(files.file(name), {read_file(original, kLongestTokenizer, /*follow_links=*/true)});
  for (const auto& [name, text] : companions.texts) write_file(files.file(name), {text});
  write_file(files.file(kConfigFile), {config_json});
  return join_problems({files.publish(), companions.note});
}

}  // namespace

std::string export_to_hugging_face(const std::string& folder, const std::string& out,
                                   const ExportOptions& options) {
  std::string notes;
  with_newest_checkpoint(folder, [&](CheckpointReader& checkpoint) {
    notes = export_checkpoint(checkpoint, out, options);
    return true;
  });
  return notes;
}

}  // namespace lockstep
