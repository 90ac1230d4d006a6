#include <iostream>
#include <memory>
#include <optional>

#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/checkpoint/sharded_safetensors.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

struct ConversionArguments {
  std::string hugging_face;
  std::string folder;
  std::string dtype = "fp32";
  std::string max_shard_size = "5GB";
  std::optional<int64_t> seq_length;
  bool adapters = false;
};

void run_export(const ConversionArguments& arguments) {
  const ExportOptions options = {
      .dtype = arguments.dtype == "bf16" ? ExportDtype::bf16 : ExportDtype::fp32,
      .max_shard_size = parse_file_size(arguments.max_shard_size, "--max-shard-size"),
      .adapters = arguments.adapters};
  note_doubt(arguments.folder);
  print_note(export_to_hugging_face(arguments.folder, arguments.hugging_face, options));
  std::cout << arguments.hugging_face << std::endl;
}

void run_import(const ConversionArguments& arguments) {
  const ImportedModel model =
      import_from_hugging_face(arguments.hugging_face, arguments.folder, arguments.seq_length);
  print_note(model.note);
  print_note(model.problem);
  std::cout << model.path << std::endl;
}

CLI::App* add_conversion(CLI::App& checkpoint, const std::string& name, const std::string& meaning,
                         const std::shared_ptr<ConversionArguments>& arguments,
                         const std::string& files, const std::string& folder) {
  CLI::App* const command = checkpoint.add_subcommand(name, meaning);
  command->add_option("--hf", arguments->hugging_face, files)->required()->check(check_path);
  command->add_option("DIR", arguments->folder, folder)->required()->check(check_path);
  return command;
}

}  // namespace

void add_checkpoint_conversions(CLI::App& checkpoint) {
  auto arguments = std::make_shared<ConversionArguments>();
  CLI::App* const to_files =
      add_conversion(checkpoint, "export",
                     "Convert a checkpoint's weights to a Hugging Face transformers model, one "
                     "weight at a time",
                     arguments, "Folder for config.json, the weights and the tokenizer's files",
                     "Folder of checkpoint.save, whose newest complete checkpoint is used, or "
                     "the folder of one checkpoint");
  to_files->add_option("--dtype", arguments->dtype, "Dtype of the written weights: bf16, fp32")
      ->type_name("bf16|fp32")
      ->capture_default_str()
      ->check(check_one_of({"bf16", "fp32"}));
  CLI::Option* const shards = to_files->add_option(
      "--max-shard-size", arguments->max_shard_size,
      "Maximum bytes of tensors in a file, in units of 1000 (KB, MB, GB, TB) or 1024 (KiB, ...). "
      "Larger models are written as several files and an index");
  shards->capture_default_str();
  to_files
      ->add_flag(
          "--adapters", arguments->adapters,
          "Write only the low-rank adapters, as adapter_model.safetensors and adapter_config.json "
          "for Hugging Face's peft, which reads them from one file. Without this option they are "
          "merged into the model's weights")
      ->excludes(shards);
  to_files->callback([arguments] { run_export(*arguments); });
  CLI::App* const from_files = add_conversion(
      checkpoint, "import",
      "Convert a Hugging Face transformers model to a checkpoint without optimizer state",
      arguments,
      "Folder with config.json and model.safetensors, or model.safetensors.index.json and its "
      "files; or the path of one of these two",
      "Folder for the checkpoint. To start from it, set checkpoint.load and checkpoint.finetune");
  from_files
      ->add_option("--seq-length", arguments->seq_length,
                   "Limit the model.seq_length of the checkpoint to this many tokens")
      ->check(check_at_least(1));
  from_files->callback([arguments] { run_import(*arguments); });
}

}  // namespace lockstep
