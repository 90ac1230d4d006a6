#include <iostream>
#include <memory>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/input_file.h"
#include "lockstep/program/argument_checks.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/megatron_flags.h"
#include "lockstep/program/shell_arguments.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

constexpr int64_t kLargestScript = 1 << 20;

struct MegatronFlagsArguments {
  std::vector<std::string> words;  // before "--": more values of the last flag of --file
  std::vector<std::string> flags;  // after it
  std::string file;
  bool list = false;
};

std::vector<std::string> words_of_script(const std::string& path) {
  const ShellArguments arguments =
      read_shell_arguments(read_file(path, kLargestScript, /*follow_links=*/true));
  const auto note = [&path](const std::string& text) {
    std::cerr << "'" + path + "': " + text + "\n";
  };
  if (arguments.has_conditions)
    note(
        "its conditions are not evaluated: all assignments are made, in their order, and of "
        "several of one variable the last counts");
  if (!arguments.left_out.empty())
    note(
        fmt::format("several commands start a program with flags; those of '{}' count, which has "
                    "the most known ones; left out: '{}'",
                    arguments.program, fmt::join(arguments.left_out, "', '")));
  for (const std::string& use : arguments.unset_arrays)
    note("does not set the array of '" + use + "', which adds nothing");
  for (const std::string& word : arguments.words)
    if (word.find('$') != std::string::npos) note("does not set what stands in '" + word + "'");
  return arguments.words;
}

void convert(const MegatronFlagsArguments& arguments) {
  std::vector<std::string> words;
  if (!arguments.file.empty()) words = words_of_script(arguments.file);
  words.insert(words.end(), arguments.words.begin(), arguments.words.end());
  words.insert(words.end(), arguments.flags.begin(), arguments.flags.end());
  require<ConfigError>(!words.empty(),
                       "megatron-flags: found no flags, allowed: flags after --, as in `lockstep "
                       "megatron-flags -- --num-layers 24`, or --file");
  const MegatronConversion conversion = convert_megatron_flags(read_megatron_flags(words));
  std::cout << conversion.text;
  for (const std::string& note : conversion.notes) std::cerr << note + "\n";
  std::vector<std::string> faults;
  if (!conversion.unknown.empty()) faults.push_back(conversion.unknown);
  try {
    parse_config(conversion.text, "the configuration built from the flags");
  } catch (const ConfigError& error) {
    faults.emplace_back(error.what());
  }
  if (faults.empty()) return;
  flush_standard_output("megatron-flags");
  fail<ConfigError>("{} (the configuration is printed anyway, for you to edit)",
                    fmt::join(faults, "; "));
}

}  // namespace

void add_megatron_flags_command(CLI::App& program, const std::vector<std::string>& flags) {
  auto arguments = std::make_shared<MegatronFlagsArguments>();
  arguments->flags = flags;
  CLI::App* const command = program.add_subcommand(
      "megatron-flags", "Turn Megatron-LM's command line into a configuration");
  command->add_option("FLAGS", arguments->words,
                      "Flags of Megatron-LM after --, as in `lockstep megatron-flags -- "
                      "--num-layers 24 --bf16`; they are applied after those of --file");
  command
      ->add_option("--file", arguments->file,
                   "Read the flags that a shell script passes to the .py program that it starts, "
                   "including variables and arrays. The script is not run")
      ->type_name("FILE")
      ->check(check_path);
  command->add_flag("--list", arguments->list,
                    "Print the known flags and their counterparts, as Markdown");
  command->footer(
      "Prints the configuration on standard output and, on standard error, each flag that has no "
      "counterpart, with the reason. Defaults of Megatron-LM that differ from Lockstep's are "
      "written out, so that the run is the same.\n"
      "Exit status 2: unknown flags, which are all named, or a configuration that Lockstep "
      "refuses; it is printed anyway. Also a value that cannot be read.");
  command->callback([arguments] {
    if (arguments->list)
      std::cout << megatron_flags_markdown();
    else
      convert(*arguments);
  });
}

}  // namespace lockstep
