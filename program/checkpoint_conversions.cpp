#include <iostream>
#include <memory>

#include "lockstep/checkpoint/hugging_face.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

struct ConversionArguments {
  std::string hugging_face;
  std::string folder;
};

}  // namespace

void add_checkpoint_conversions(CLI::App& checkpoint) {
  auto arguments = std::make_shared<ConversionArguments>();
  const auto add = [&](const std::string& name, const std::string& meaning,
                       const std::string& files, const std::string& folder) {
    CLI::App* const command = checkpoint.add_subcommand(name, meaning);
    command->add_option("--hf", arguments->hugging_face, files)->required();
    command->add_option("DIR", arguments->folder, folder)->required();
    return command;
  };
  add("export", "Write a checkpoint's weights in fp32 as a model of Hugging Face's transformers",
      "Folder for config.json and model.safetensors",
      "Folder of checkpoint.save; its newest complete checkpoint is taken")
      ->callback([arguments] {
        const std::string left = export_to_hugging_face(arguments->folder, arguments->hugging_face);
        if (!left.empty()) std::cerr << "lockstep: " + left + "\n";
        std::cout << arguments->hugging_face << std::endl;
      });
  add("import", "Make a checkpoint, without optimizer state, from such a model",
      "Folder with config.json and model.safetensors",
      "Folder for the checkpoint; checkpoint.load and checkpoint.finetune start from it")
      ->callback([arguments] {
        std::cout << import_from_hugging_face(arguments->hugging_face, arguments->folder)
                  << std::endl;
      });
}

}  // namespace lockstep
