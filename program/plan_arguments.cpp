#include "lockstep/program/plan_arguments.h"

#include <algorithm>
#include <vector>

#include "lockstep/program/standard_descriptors.h"

namespace lockstep {

namespace {

bool continues_name(char c) {
  return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-';
}

/// Whether `text` begins with the name of a parameter. "rank" and the like are also plain words.
bool names_parameter(std::string_view text, std::string_view name) {
  if (!text.starts_with(name)) return false;
  const std::string_view rest = text.substr(name.size());
  if (name.find('-') != name.npos) return rest.empty() || !continues_name(rest.front());
  return rest.starts_with(":") || rest.starts_with(" (") || rest.starts_with(" '");
}

}  // namespace

std::string with_option_names(const CLI::App& command, std::string_view message) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options())
    if (option->get_items_expected_max() == 1)
      names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  std::string text;
  for (size_t i = 0; i < message.size(); ++i) {
    const char before = i == 0 ? ' ' : message[i - 1];
    const bool named =
        before == ' ' && std::any_of(names.begin(), names.end(), [&](const auto& name) {
          return names_parameter(message.substr(i), name);
        });
    text += named ? "--" : "";
    text += message[i];
  }
  return text;
}

void add_machine_options(CLI::App& command, int64_t& world_size, std::string& machine_path) {
  command.add_option("--world-size", world_size, "Number of ranks of the job")
      ->required()
      ->check(check_integer);
  command
      .add_option("--machine", machine_path, "Machine file, or the name of one in configs/machines")
      ->type_name("FILE")
      ->required()
      ->check(check_path);
}

void add_optional_world_size(CLI::App& command, std::optional<int64_t>& world_size) {
  command
      .add_option("--world-size", world_size,
                  "Number of ranks of the job; unset: the fewest that the layout allows, a "
                  "multiple of tensor x context x pipeline and expert tensor x expert x pipeline")
      ->check(check_integer);
}

void flush_output(const CLI::App& command) {
  const std::string name = command.get_name();
  flush_standard_output(name == "plan" ? name : "plan " + name);
}

}  // namespace lockstep
