#include <iostream>
#include <memory>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/datasets/tokenizer.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/training/generate.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

struct GenerateArguments {
  std::string checkpoint;
  std::string prompt;
  GenerateOptions options;
};

void run(const GenerateArguments& arguments) {
  const SavedModel saved =
      load_model(arguments.checkpoint, choose_device(DeviceChoice::auto_, LaunchEnvironment{}));
  const auto tokenizer = make_tokenizer(saved.config.data.tokenizer, "data.tokenizer");
  const auto prompt = tokenizer->encode(arguments.prompt);
  std::cout << arguments.prompt << std::flush;
  generate(*saved.model, prompt, arguments.options,
           [&](int64_t token) { std::cout << tokenizer->decode_more({token}) << std::flush; });
  std::cout << std::endl;
}

}  // namespace

void add_generate_command(CLI::App& program) {
  auto arguments = std::make_shared<GenerateArguments>();
  CLI::App* const command =
      program.add_subcommand("generate", "Continue a text with a model that `train` saved");
  command
      ->add_option("CHECKPOINT", arguments->checkpoint,
                   "Folder of checkpoint.save; its newest checkpoint is taken")
      ->required();
  command->add_option("--prompt", arguments->prompt, "Start of the text")->required();
  GenerateOptions& options = arguments->options;
  command->add_option("--max-tokens", options.max_tokens, "Number of tokens to generate")
      ->capture_default_str()
      ->check(check_at_least(0));
  command
      ->add_option("--temperature", options.temperature,
                   "Divides the logits; 0 takes the most likely token")
      ->capture_default_str()
      ->check(check_not_negative);
  command
      ->add_option("--top-k", options.top_k,
                   "Sample from this many of the most likely tokens; 0: from all")
      ->capture_default_str()
      ->check(check_at_least(0));
  command
      ->add_option("--seed", options.seed,
                   "Seed of the sampling; the same seed gives the same text")
      ->capture_default_str()
      ->check(check_at_least(0));
  command->callback([arguments] { run(*arguments); });
}

}  // namespace lockstep
