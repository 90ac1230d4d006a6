#include "lockstep/program/command_texts.h"

#include <algorithm>

namespace lockstep {
namespace {

OptionText option_text(const CLI::Option& option) {
  OptionText text;
  text.name = option.get_name();
  text.is_argument = option.get_positional();
  const bool takes_value = option.get_items_expected_max() > 0;
  if (takes_value && !text.is_argument) text.value = option.get_type_name();
  text.default_value = option.get_default_str();
  text.meaning = option.get_description();
  text.required = option.get_required();
  text.repeated = option.get_items_expected_max() > 1;
  return text;
}

void append(const CLI::App& app, const std::string& name, std::vector<CommandText>& all) {
  CommandText text;
  text.name = name;
  text.meaning = app.get_description();
  text.footer = app.get_footer();
  for (const CLI::Option* option : app.get_options()) text.options.push_back(option_text(*option));
  std::stable_partition(text.options.begin(), text.options.end(),
                        [](const OptionText& option) { return option.is_argument; });
  const auto inside = app.get_subcommands([](const CLI::App*) { return true; });
  for (const CLI::App* command : inside) text.commands.push_back(command->get_name());
  all.push_back(std::move(text));
  for (const CLI::App* command : inside)
    append(*command, name.empty() ? command->get_name() : name + " " + command->get_name(), all);
}

}  // namespace

std::vector<CommandText> command_texts(const CLI::App& program) {
  std::vector<CommandText> all;
  append(program, "", all);
  return all;
}

std::string facts_of(const ConfigField& field) {
  std::string facts = field.type;
  if (!field.unit.empty()) facts += ", in " + field.unit;
  if (!field.allowed.empty()) facts += ", " + field.allowed;
  if (!field.default_value.empty()) facts += ", default ";
  for (const char c : field.default_value) facts += c == '\n' ? "\\n" : std::string(1, c);
  if (!field.unset.empty()) facts += ", unset: " + field.unset;
  return facts;
}

bool ends_with_schema(const CommandText& command) { return command.name == "train"; }

}  // namespace lockstep
