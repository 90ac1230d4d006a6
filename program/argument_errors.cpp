#include "lockstep/program/argument_errors.h"

#include <algorithm>
#include <string_view>

#include "lockstep/core/check.h"
#include "lockstep/core/nearest_name.h"

namespace lockstep {
namespace {

/// The command that the arguments name, as far as CLI11 has read them.
struct ChosenCommand {
  explicit ChosenCommand(const CLI::App& program) : app(&program) {
    while (!app->get_subcommands().empty()) {
      app = app->get_subcommands().front();
      path += " " + app->get_name();
    }
  }
  /// "; see `lockstep train --help`"
  std::string see_help() const { return fmt::format("; see `{} --help`", path); }

  const CLI::App* app;
  std::string path = "lockstep";
};

/// "--set" for "--set=PATH=VALUE".
std::string name_of(const std::string& argument) { return argument.substr(0, argument.find('=')); }

/// "; --json belongs after `lockstep plan groups`", for an option of the command that stands where
/// the command does not read it; otherwise empty.
std::string describe_place(const ChosenCommand& command, const std::vector<std::string>& given,
                           const std::string& argument) {
  const std::string name = name_of(argument);
  if (!name.starts_with('-') || command.app->get_option_no_throw(name) == nullptr) return "";
  const auto of_command = std::find(given.begin(), given.end(), command.app->get_name());
  const auto of_option = std::find(given.begin(), given.end(), argument);
  if (of_command == given.end()) return "";
  if (of_option < of_command) return fmt::format("; {} belongs after `{}`", name, command.path);
  const bool has_dashes = std::find(of_command, given.end(), "--") != given.end();
  return has_dashes ? fmt::format("; {} belongs before `--`", name) : "";
}

/// The options of the command that the first misspelled one is near to.
std::vector<std::string> nearest_options(const CLI::App& command,
                                         const std::vector<std::string>& found) {
  std::vector<std::string> known;
  for (const CLI::Option* option : command.get_options())
    if (!option->get_positional()) known.push_back(option->get_name());
  for (const std::string& argument : found) {
    const std::string name = name_of(argument);
    if (!argument.starts_with("--") || command.get_option_no_throw(name) != nullptr) continue;
    if (auto near = nearest_names(name, known); !near.empty()) return near;
  }
  return {};
}

/// "--tensor: found twice, allowed: once", for CLI11's "--tensor: At Most 1 required but received
/// 2"; otherwise empty.
std::string describe_repetition(const std::string& message) {
  constexpr std::string_view kMost = ": At Most 1 required but received ";
  const size_t at = message.find(kMost);
  if (at == std::string::npos) return "";
  const std::string count = message.substr(at + kMost.size());
  return fmt::format("{}: found {}, allowed: once", message.substr(0, at),
                     count == "2" ? "twice" : count + " times");
}

/// "--json: found 'maybe', allowed: ...", for CLI11's "Could not convert: --json = maybe";
/// otherwise empty.
std::string describe_value(const CLI::App& command, const std::string& message) {
  constexpr std::string_view kFailed = "Could not convert: ", kEquals = " = ";
  const size_t end = message.find(kEquals);
  if (!message.starts_with(kFailed) || end == std::string::npos) return "";
  const std::string name = message.substr(kFailed.size(), end - kFailed.size());
  const CLI::Option* const option = command.get_option_no_throw(name);
  if (option == nullptr) return "";
  const bool is_flag = option->get_items_expected_max() == 0;
  return fmt::format("{}: found '{}', allowed: {}", name, message.substr(end + kEquals.size()),
                     is_flag ? "no value, true or false" : option->get_type_name());
}

}  // namespace

std::string unexpected_arguments(const CLI::App& program, const std::vector<std::string>& given) {
  const std::vector<std::string> found = program.remaining(true);
  if (found.empty()) return "";
  const ChosenCommand command(program);
  std::string place;
  for (const std::string& argument : found)
    if (place.empty()) place = describe_place(command, given, argument);
  if (place.empty()) place = did_you_mean(nearest_options(*command.app, found), command.see_help());
  return fmt::format("not expected: {}{}", fmt::join(found, " "), place);
}

std::string describe_argument_error(const CLI::App& program, const CLI::ParseError& error) {
  const ChosenCommand command(program);
  const std::string message = error.what();
  std::string told = describe_repetition(message);
  if (told.empty()) told = describe_value(*command.app, message);
  return (told.empty() ? message : told) + command.see_help();
}

}  // namespace lockstep
