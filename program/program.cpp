#include "lockstep/program/program.h"

#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/nearest_name.h"
#include "lockstep/datasets/mapped_files.h"
#include "lockstep/program/argument_errors.h"
#include "lockstep/program/command_texts.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/named_configs.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

std::vector<const CLI::App*> commands_inside(const CLI::App& app) {
  return app.get_subcommands([](const CLI::App*) { return true; });
}

/// Whether `word` is a configuration that `app` takes, in addition to its commands.
bool is_config(const CLI::App& app, const std::string& word) {
  const auto options = app.get_options();
  if (std::none_of(options.begin(), options.end(),
                   [](const CLI::Option* option) { return option->get_positional(); }))
    return false;
  const auto known = named_configs();
  return word.find_first_of("/.") != word.npos || ::access(word.c_str(), F_OK) == 0 ||
         std::any_of(known.begin(), known.end(),
                     [&](const NamedConfig& config) { return config.name == word; });
}

/// CLI11 alone would only say that a command is missing.
void check_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* app = &program;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    const auto commands = commands_inside(*app);
    if (commands.empty()) return;
    std::vector<std::string> names;
    const CLI::App& above = *app;
    app = nullptr;
    for (const CLI::App* command : commands) {
      if (command->get_name() == argv[i]) app = command;
      names.push_back(command->get_name());
    }
    if (app == nullptr && is_config(above, argv[i])) return;
    if (app == nullptr)
      fail<ConfigError>("unknown command '{}'{}", argv[i],
                        did_you_mean(nearest_names(argv[i], names),
                                     fmt::format("; allowed: {}", fmt::join(names, ", "))));
  }
}

/// The message without the C++ frames that libtorch appends, unless they are requested as
/// everywhere in PyTorch.
std::string without_frames(const std::string& message) {
  const char* const wanted = std::getenv("TORCH_SHOW_CPP_STACKTRACES");
  if (wanted && std::string(wanted) == "1") return message;
  return message.substr(
      0, std::min(message.find("\nException raised from "), message.find("\nframe #0: ")));
}

/// Ends the process without waiting for communication threads, which may never return after a
/// failure.
[[noreturn]] void end(int status, const std::string& message = "") {
  std::cout.flush();
  if (!message.empty()) std::cerr << "lockstep: " + without_frames(message) + "\n" << std::flush;
  std::fflush(nullptr);
  std::_Exit(status);
}

/// Prints what was asked for, such as --help, or says what is wrong with the arguments.
int end_of_parsing(const CLI::App& program, const CLI::ParseError& parsed) {
  const bool asked_for = parsed.get_exit_code() == 0;
  if (!asked_for) end(2, describe_argument_error(program, parsed));
  program.exit(parsed);
  try {
    flush_standard_output();
  } catch (const FileError& error) {
    end(1, error.what());
  }
  return 0;
}

/// Adds the exit status to every help text.
class HelpFormatter : public CLI::Formatter {
 public:
  std::string make_footer(const CLI::App* app) const override {
    const std::string footer = app->get_footer();
    return footer + (footer.empty() ? "" : "\n\n") + "Exit status: " + kExitStatus + "\n";
  }
};

}  // namespace

int run_program(int argc, char** argv, const std::function<void(CLI::App& program)>& add_commands) {
  tell_faults_of_mapped_files();
  watch_standard_output();
  std::signal(SIGXFSZ, SIG_IGN);  // so that a write beyond ulimit -f fails with a message
  CLI::App program("Trains transformer models on many devices, on libtorch and c10d.", "lockstep");
  try {
    program.require_subcommand(1);
    program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
    program.formatter(std::make_shared<HelpFormatter>());
    add_commands(program);
    check_command(program, argc, argv);
    program.parse(argc, argv);
    flush_standard_output();
    return 0;
  } catch (const CLI::RequiredError& error) {
    const std::string others = unexpected_arguments(program, {argv + 1, argv + argc});
    if (others.empty()) return end_of_parsing(program, error);
    end(2, fmt::format("{}; {}", error.what(), others));
  } catch (const CLI::ExtrasError&) {
    end(2, unexpected_arguments(program, {argv + 1, argv + argc}));
  } catch (const CLI::ParseError& error) {
    return end_of_parsing(program, error);
  } catch (const ExitStatus& exit) {
    end(exit.status, exit.message);
  } catch (const ConfigError& error) {
    end(2, error.what());
  } catch (const std::exception& error) {
    end(1, error.what());
  }
}

int run_program_with_words(
    int argc, char** argv,
    const std::function<void(CLI::App& program, const std::vector<std::string>& words)>&
        add_command) {
  char** const dashes = std::find(argv, argv + argc, std::string_view("--"));
  std::vector<std::string> words;
  if (dashes != argv + argc) words.assign(dashes + 1, argv + argc);
  return run_program(static_cast<int>(dashes - argv), argv,
                     [&](CLI::App& program) { add_command(program, words); });
}

}  // namespace lockstep
