#include <algorithm>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <unordered_map>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/safetensors_header.h"
#include "lockstep/checkpoint/shard_file.h"
#include "lockstep/core/check.h"
#include "lockstep/core/counted.h"
#include "lockstep/parallel_state/parallel_axes.h"
#include "lockstep/planner/stage_shapes.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

using Json = nlohmann::ordered_json;

struct CheckpointArguments {
  std::string folder;
  bool json = false;
};

Json layout_json(const ManifestLayout& layout) {
  Json json = {{"world_size", layout.world_size}};
  for (const ParallelSize* size : parallel_size_table())
    json[size->name_with('_')] = size->of(layout);
  json["order"] = layout.order;
  json["distributed_optimizer"] = layout.distributed_optimizer;
  json["optimizer_instances"] = layout.optimizer_instances;
  return json;
}

int64_t total_bytes(const Manifest& manifest) {
  int64_t bytes = 0;
  for (const ManifestFile& file : manifest.files) bytes += file.size;
  return bytes;
}

int64_t num_parameters(const Manifest& manifest) {
  int64_t count = 0;
  for (const ManifestTensor& tensor : manifest.tensors)
    if (tensor.state.empty()) count += tensor.numel();
  return count;
}

void print(const Json& json) {
  std::cout << json.dump(-1, ' ', false, Json::error_handler_t::replace) << std::endl;
}

void print_table(const Json& json, const Manifest& manifest) {
  for (const auto& [name, value] : json.items())
    if (!value.is_structured())
      std::cout << fmt::format("{:<18}{}\n", name,
                               value.is_string() ? value.get<std::string>() : value.dump());
  for (const ManifestTensor& tensor : manifest.tensors)
    std::cout << fmt::format("{:<64} {:<5} [{}] in {}\n", tensor.key(), tensor.dtype,
                             fmt::join(tensor.shape, ", "),
                             counted(static_cast<int64_t>(tensor.pieces.size()), "piece"));
}

/// Sorts by the model's order of parameters; tensors of no parameter come last.
void sort_in_model_order(CheckpointReader& checkpoint, std::vector<ManifestTensor>& tensors) {
  std::unordered_map<std::string, size_t> places;
  for (const ShapedParameter& param : model_parameters(checkpoint.config()))
    places.emplace(param.name, places.size());
  const auto place = [&places](const ManifestTensor& tensor) {
    const auto found = places.find(tensor.name);
    return found == places.end() ? places.size() : found->second;
  };
  std::stable_sort(
      tensors.begin(), tensors.end(),
      [&](const ManifestTensor& a, const ManifestTensor& b) { return place(a) < place(b); });
}

/// FileError if a file of the checkpoint is missing or has another size.
void check_files(const CheckpointReader& checkpoint) {
  for (const ManifestFile& file : checkpoint.manifest().files) ShardReader(checkpoint.path(), file);
}

void inspect(const CheckpointArguments& arguments) {
  note_doubt(arguments.folder);
  std::string path;
  Manifest manifest;
  with_newest_checkpoint(arguments.folder, [&](CheckpointReader& checkpoint) {
    path = checkpoint.path();
    manifest = checkpoint.manifest();
    check_files(checkpoint);
    sort_in_model_order(checkpoint, manifest.tensors);
    return true;
  });
  Json json = {{"path", path},
               {"iteration", manifest.iteration},
               {"consumed_samples", manifest.consumed_samples},
               {"optimizer_steps", manifest.optimizer_steps},
               {"parameters", num_parameters(manifest)},
               {"bytes", total_bytes(manifest)},
               {"layout", layout_json(manifest.layout)},
               {"files", Json::array()},
               {"tensors", Json::array()},
               {"checkpoints", complete_checkpoints(arguments.folder)}};
  for (const ManifestFile& file : manifest.files)
    json["files"].push_back({{"name", file.name}, {"bytes", file.size}});
  for (const ManifestTensor& tensor : manifest.tensors)
    json["tensors"].push_back({{"name", tensor.name},
                               {"state", tensor.state},
                               {"dtype", tensor.dtype},
                               {"shape", tensor.shape},
                               {"pieces", tensor.pieces.size()}});
  if (arguments.json)
    print(json);
  else
    print_table(json, manifest);
}

/// The findings of verify().
struct Verified {
  std::string path;
  std::optional<Manifest> manifest;  ///< unset: it is damaged itself
  std::vector<CheckpointDamage> damage;
};

Verified verify_newest(const std::string& folder) {
  Verified found;
  try {
    with_newest_checkpoint(folder, [&](const CheckpointReader& checkpoint) {
      found = {checkpoint.path(), checkpoint.manifest(), verify_checkpoint(checkpoint)};
      return found.damage.empty();
    });
  } catch (const FileError& error) {
    if (!has_checkpoint(folder)) throw;
    const std::string path = find_checkpoint(folder);
    found = {path, std::nullopt, {{path + "/" + kManifestName, "", 0, error.what()}}};
  }
  return found;
}

void verify(const CheckpointArguments& arguments) {
  note_doubt(arguments.folder);
  const auto [path, readable, damage] = verify_newest(arguments.folder);
  const Manifest manifest = readable.value_or(Manifest{});
  Json json = {{"path", path},
               {"ok", damage.empty()},
               {"iteration", readable ? Json(manifest.iteration) : Json()},
               {"files", manifest.files.size()},
               {"bytes", total_bytes(manifest)},
               {"damage", Json::array()}};
  std::string message;
  for (const CheckpointDamage& one : damage) {
    json["damage"].push_back({{"file", one.file},
                              {"tensor", one.tensor},
                              {"offset", one.offset},
                              {"message", one.message}});
    message += (message.empty() ? "" : "\nlockstep: ") + one.message;
  }
  if (arguments.json) print(json);
  if (!damage.empty()) throw ExitStatus{1, message};
  if (!arguments.json)
    std::cout << fmt::format("{}: {}, {}, all good", path,
                             counted(static_cast<int64_t>(manifest.files.size()), "file"),
                             counted(total_bytes(manifest), "byte"))
              << std::endl;
}

CLI::App* add_check(CLI::App& parent, const std::string& name, const std::string& meaning,
                    void (*run)(const CheckpointArguments&)) {
  auto arguments = std::make_shared<CheckpointArguments>();
  CLI::App* const command = parent.add_subcommand(name, meaning);
  command
      ->add_option("DIR", arguments->folder,
                   "Folder of checkpoint.save, whose newest complete checkpoint is used, or the "
                   "folder of one checkpoint")
      ->required()
      ->check(check_path);
  command->add_flag("--json", arguments->json, "Print one JSON document");
  command->callback([arguments, run] { run(*arguments); });
  return command;
}

}  // namespace

CLI::App* add_checkpoint_command(CLI::App& program) {
  CLI::App* const checkpoint =
      program.add_subcommand("checkpoint", "Inspect, verify and convert checkpoints");
  checkpoint->require_subcommand(1);
  add_check(*checkpoint, "inspect",
            "Print the contents of a checkpoint; shapes are in elements, sizes in bytes", inspect)
      ->footer(
          "Reads the manifest, and checks that all files exist and have the right size; `lockstep "
          "checkpoint verify` reads the files themselves.\n"
          "JSON: path, iteration, consumed_samples (sequences), optimizer_steps, parameters "
          "(number of elements), bytes (of all files), layout (of the run that saved it), files "
          "(name, bytes), tensors (name; state, empty for a weight; dtype; shape, of the whole "
          "tensor; pieces, how many it is stored in), checkpoints (the complete ones in DIR, "
          "newest first).");
  add_check(*checkpoint, "verify",
            "Read every byte of a checkpoint and compare it with the checksums", verify)
      ->footer(
          "JSON: path, ok, iteration, files (how many), bytes (of all files), damage (file; "
          "tensor, the first one in the damaged bytes; offset, in bytes; message). iteration is "
          "null if the manifest is damaged. The exit status is 1 if there is damage.");
  return checkpoint;
}

}  // namespace lockstep
