#include "lockstep/program/program.h"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "lockstep/core/check.h"
#include "lockstep/datasets/mapped_files.h"
#include "lockstep/program/commands.h"
#include "lockstep/program/standard_descriptors.h"

namespace lockstep {
namespace {

/// CLI11 alone would only say that a command is missing.
void check_command(const CLI::App& program, int argc, char** argv) {
  const CLI::App* app = &program;
  for (int i = 1; i < argc && argv[i][0] != '-'; ++i) {
    const auto commands = app->get_subcommands([](const CLI::App*) { return true; });
    if (commands.empty()) return;
    std::string names;
    app = nullptr;
    for (const CLI::App* command : commands) {
      if (command->get_name() == argv[i]) app = command;
      names += (names.empty() ? "" : ", ") + command->get_name();
    }
    if (app == nullptr)
      throw ConfigError("unknown command '" + std::string(argv[i]) + "'; allowed: " + names);
  }
}

/// Without the C++ frames that libtorch appends, unless they are asked for as everywhere in
/// PyTorch.
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

/// Tells what is wrong with the arguments, or prints what was asked for, such as --help.
int exit_status(const CLI::App& program, const CLI::ParseError& parsed) {
  if (program.exit(parsed) != 0) return 2;
  try {
    flush_standard_output();
  } catch (const FileError& error) {
    end(1, error.what());
  }
  return 0;
}

}  // namespace

int run_program(int argc, char** argv, const std::function<void(CLI::App& program)>& add_commands) {
  tell_faults_of_mapped_files();
  watch_standard_output();
  std::signal(SIGXFSZ, SIG_IGN);  // so that a write beyond ulimit -f fails, by name
  CLI::App program("Trains transformer models on many devices, on libtorch and c10d.", "lockstep");
  try {
    program.require_subcommand(1);
    program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
    program.footer(
        "Exit status: 0 done; 1 failed while running; 2 unusable arguments or configuration; "
        "3 stopped early by SIGTERM or SIGINT, state saved; 4 stopped because the training "
        "diverged.");
    add_commands(program);
    check_command(program, argc, argv);
    program.parse(argc, argv);
    flush_standard_output();
    return 0;
  } catch (const CLI::RequiredError& error) {
    const auto others = program.remaining(true);
    if (others.empty()) return exit_status(program, error);
    end(2, fmt::format("{}; not expected: {}", error.what(), fmt::join(others, " ")));
  } catch (const CLI::ParseError& error) {
    return exit_status(program, error);
  } catch (const ExitStatus& exit) {
    end(exit.status, exit.message);
  } catch (const ConfigError& error) {
    end(2, error.what());
  } catch (const std::exception& error) {
    end(1, error.what());
  }
}

}  // namespace lockstep
