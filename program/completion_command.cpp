#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/completion_scripts.h"
#include "lockstep/program/named_configs.h"

namespace lockstep {
namespace {

struct CompletionArguments {
  std::string shell;
  std::string output;
};

std::string check_shell(const std::string& text) {
  return text == "bash" || text == "zsh" ? "" : fmt::format("found '{}', allowed: bash, zsh", text);
}

void write_completion(const CLI::App& program, const CompletionArguments& arguments) {
  const auto script = arguments.shell == "bash" ? bash_completion : zsh_completion;
  std::vector<std::string> configs;
  for (const NamedConfig& config : named_configs()) configs.push_back(config.name);
  const std::string text = script(command_texts(program), config_fields(), configs);
  if (arguments.output.empty())
    std::cout << text;
  else
    write_output_file(arguments.output, text);
}

}  // namespace

void add_completion_command(CLI::App& program) {
  auto arguments = std::make_shared<CompletionArguments>();
  CLI::App* const command =
      program.add_subcommand("completion", "Print a shell completion script for lockstep");
  command->add_option("SHELL", arguments->shell, "bash or zsh")->required()->check(check_shell);
  command->add_option("--output", arguments->output, "Write the script into this file instead")
      ->type_name("FILE")
      ->check(check_path);
  command->footer(
      "To try it in bash: source <(lockstep completion bash).\n"
      "To install it for bash: lockstep completion bash --output "
      "~/.local/share/bash-completion/completions/lockstep\n"
      "To install it for zsh: write it as _lockstep into a folder in $fpath.");
  command->callback([&program, arguments] { write_completion(program, *arguments); });
}

}  // namespace lockstep
