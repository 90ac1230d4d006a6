#include <algorithm>
#include <iostream>
#include <memory>
#include <optional>

#include "lockstep/core/check.h"
#include "lockstep/core/input_file.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"

namespace lockstep {
namespace {

struct ConfigsArguments {
  std::optional<std::string> path;
  std::optional<std::string> show;
};

NamedConfig chosen(const char* option, const std::string& name) {
  try {
    return named_config(name);
  } catch (const ConfigError& error) {
    fail<ConfigError>("{}: {}", option, error.what());
  }
}

void print_list() {
  const auto configs = named_configs();
  size_t width = 0;
  for (const NamedConfig& config : configs) width = std::max(width, config.name.size());
  for (const NamedConfig& config : configs)
    std::cout << fmt::format("{:<{}}  {}\n", config.name, width, config.description);
}

void run(const ConfigsArguments& arguments) {
  if (arguments.path) {
    std::cout << chosen("--path", *arguments.path).path << "\n";
  } else if (arguments.show) {
    InputFile file(chosen("--show", *arguments.show).path);
    std::cout << read_all(file);
  } else {
    print_list();
  }
}

}  // namespace

void add_configs_command(CLI::App& program) {
  auto arguments = std::make_shared<ConfigsArguments>();
  CLI::App* const command = program.add_subcommand(
      "configs", "List the configurations that come with lockstep; `train NAME` takes one");
  auto* const path =
      command->add_option("--path", arguments->path, "Print the path of this configuration")
          ->type_name("NAME");
  command->add_option("--show", arguments->show, "Print this configuration")
      ->type_name("NAME")
      ->excludes(path);
  command->callback([arguments] { run(*arguments); });
}

}  // namespace lockstep
