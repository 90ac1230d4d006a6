// The `lockstep` program. Exit status: 0 done, 1 failed while running, 2 unusable arguments or
// configuration.

#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "lockstep/core/error.h"
#include "lockstep/training/cli/commands.h"

namespace {

/// CLI11 alone would only say that a command is missing.
void check_command(const CLI::App& program, int argc, char** argv) {
  if (argc < 2 || argv[1][0] == '-') return;
  std::string names;
  for (const CLI::App* command : program.get_subcommands([](const CLI::App*) { return true; })) {
    if (command->get_name() == argv[1]) return;
    names += (names.empty() ? "" : ", ") + command->get_name();
  }
  throw lockstep::ConfigError("unknown command '" + std::string(argv[1]) + "'; allowed: " + names);
}

/// Ends the process without waiting for communication threads, which may never return after a
/// failure.
[[noreturn]] void end(int status, const std::string& message = "") {
  std::cout.flush();
  if (!message.empty()) std::cerr << "lockstep: " + message + "\n" << std::flush;
  std::fflush(nullptr);
  std::_Exit(status);
}

void add_commands(CLI::App& program) {
  program.require_subcommand(1);
  program.set_version_flag("--version", "lockstep " LOCKSTEP_VERSION);
  program.footer(
      "Exit status: 0 done; 1 failed while running; 2 unusable arguments or "
      "configuration.");
  lockstep::add_train_command(program);
  lockstep::add_generate_command(program);
  lockstep::add_doctor_command(program);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App program("Trains transformer models on many devices, on libtorch and c10d.", "lockstep");
  try {
    add_commands(program);
    check_command(program, argc, argv);
    program.parse(argc, argv);
    return 0;
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : 2;
  } catch (const lockstep::ExitStatus& exit) {
    end(exit.status, exit.message);
  } catch (const lockstep::ConfigError& error) {
    end(2, error.what());
  } catch (const std::exception& error) {
    end(1, error.what());
  }
}
