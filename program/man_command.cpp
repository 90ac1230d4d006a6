#include <filesystem>
#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/nearest_name.h"
#include "lockstep/datasets/unfinished_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/manual_pages.h"

namespace lockstep {
namespace {

struct ManArguments {
  std::vector<std::string> command;
  std::string output;
};

void write_pages(const std::vector<ManualPage>& pages, const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<FileError>(!error, "'{}' cannot be created: {}", folder, error.message());
  for (const ManualPage& page : pages)
    write_output_file(folder + "/" + page.name + ".1", page.text);
}

void print_page(const std::vector<ManualPage>& pages, const std::vector<std::string>& words) {
  std::string wanted = "lockstep";
  for (const std::string& word : words) wanted += "-" + word;
  std::vector<std::string> names;
  for (const ManualPage& page : pages) {
    names.push_back(page.name);
    if (page.name != wanted) continue;
    std::cout << page.text;
    return;
  }
  fail<ConfigError>("man: there is no page '{}'{}", wanted,
                    did_you_mean(nearest_names(wanted, names), "; see `lockstep --help`"));
}

}  // namespace

void add_man_command(CLI::App& program) {
  auto arguments = std::make_shared<ManArguments>();
  CLI::App* const command = program.add_subcommand(
      "man", "Print a manual page, as in `lockstep man plan groups | man -l -`");
  CLI::Option* const words =
      command->add_option("COMMAND", arguments->command,
                          "The command that the page describes; without it, lockstep itself");
  command
      ->add_option("--output", arguments->output,
                   "Write all pages into this folder instead, as lockstep.1, lockstep-train.1 and "
                   "so on")
      ->type_name("DIR")
      ->check(check_path)
      ->excludes(words);
  command->callback([&program, arguments] {
    const auto pages = manual_pages(command_texts(program), config_fields());
    if (arguments->output.empty())
      print_page(pages, arguments->command);
    else
      write_pages(pages, arguments->output);
  });
}

}  // namespace lockstep
