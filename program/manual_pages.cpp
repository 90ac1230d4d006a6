#include "lockstep/program/manual_pages.h"

#include <algorithm>
#include <sstream>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

/// The spelling of a character that troff would take for a command or draw differently.
std::string escaped(char c) {
  switch (c) {
    case '\\':
      return "\\e";
    case '-':
      return "\\-";
    case '\'':
      return "\\(aq";
    case '`':
      return "\\(ga";
    case '^':
      return "\\(ha";
    case '~':
      return "\\(ti";
    case '\n':
      return " ";
    default:
      return {c};
  }
}

/// `text` for troff, in one line.
std::string escaped(const std::string& text) {
  std::string result = text.starts_with('.') ? "\\&" : "";
  for (const char c : text) result += escaped(c);
  return result;
}

std::string bold(const std::string& text) { return "\\fB" + escaped(text) + "\\fR"; }
std::string italic(const std::string& text) { return "\\fI" + escaped(text) + "\\fR"; }

/// Makes a paragraph of each line of the text.
std::string paragraphs(const std::string& text) {
  std::string result;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) result += (result.empty() ? "" : ".PP\n") + escaped(line) + "\n";
  return result;
}

/// The text after the schema, of which only the first line is not indented.
std::string after_schema(const std::string& footer) {
  std::string rest;
  std::istringstream lines(footer);
  std::string line;
  std::getline(lines, line);
  while (std::getline(lines, line))
    if (!line.starts_with(' ')) rest += line + "\n";
  return rest;
}

std::string page_name(const std::string& command) {
  std::string name = "lockstep" + (command.empty() ? "" : "-" + command);
  std::replace(name.begin(), name.end(), ' ', '-');
  return name;
}

/// "CONFIG", "[--set PATH=VALUE]..."
std::string usage_of(const OptionText& option) {
  std::string text = option.is_argument ? italic(option.name) : bold(option.name);
  if (!option.value.empty()) text += " " + italic(option.value);
  if (!option.required) text = "[" + text + "]";
  return option.repeated ? text + "..." : text;
}

std::string synopsis(const CommandText& command) {
  std::string text = bold("lockstep" + (command.name.empty() ? "" : " " + command.name));
  const bool takes_arguments = !command.options.empty() && command.options.front().is_argument;
  if (!command.commands.empty())
    text += takes_arguments ? " [" + italic("COMMAND") + "]" : " " + italic("COMMAND");
  for (const OptionText& option : command.options)
    if (option.name != "--help") text += "\n" + usage_of(option);
  return text + "\n";
}

std::string tagged(const std::string& tag, const std::string& meaning) {
  return ".TP\n" + tag + "\n" + escaped(meaning) + "\n";
}

std::string options(const CommandText& command) {
  std::string text;
  for (const OptionText& option : command.options) {
    std::string tag = option.is_argument ? italic(option.name) : bold(option.name);
    if (!option.value.empty()) tag += " " + italic(option.value);
    std::string meaning = option.meaning;
    if (!option.default_value.empty()) meaning += " (default: " + option.default_value + ")";
    text += tagged(tag, meaning);
  }
  return text;
}

std::string commands_inside(const CommandText& command, const std::vector<CommandText>& all) {
  std::string text;
  for (const std::string& word : command.commands) {
    const std::string name = command.name.empty() ? word : command.name + " " + word;
    const auto inside = std::find_if(all.begin(), all.end(),
                                     [&](const CommandText& other) { return other.name == name; });
    text += tagged(bold(page_name(name)) + "(1)", inside->meaning);
  }
  return text;
}

std::string page(const CommandText& command, const std::vector<CommandText>& all,
                 const std::vector<ConfigField>& fields) {
  const std::string name = page_name(command.name);
  std::string title = name;
  std::transform(title.begin(), title.end(), title.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  std::string text =
      fmt::format(".TH {} 1 \"\" \"lockstep {}\" \"Lockstep\"\n", escaped(title), LOCKSTEP_VERSION);
  text += ".SH NAME\n" + escaped(name) + " \\- " + escaped(command.meaning) + "\n";
  text += ".SH SYNOPSIS\n" + synopsis(command);
  if (!command.commands.empty()) text += ".SH COMMANDS\n" + commands_inside(command, all);
  text += ".SH OPTIONS\n" + options(command);
  std::string footer = command.footer;
  if (ends_with_schema(command)) {
    text += ".SH CONFIGURATION\nText protobuf; \\fB\\-\\-set\\fR takes each of these paths.\n";
    for (const ConfigField& field : fields)
      text += tagged(bold(field.path), field.meaning + " (" + facts_of(field) + ")");
    footer = after_schema(footer);
  }
  if (const std::string notes = paragraphs(footer); !notes.empty()) text += ".SH NOTES\n" + notes;
  text += ".SH EXIT STATUS\n" + escaped(kExitStatus) + "\n";
  if (!command.name.empty()) text += ".SH SEE ALSO\n.BR lockstep (1)\n";
  return text;
}

}  // namespace

std::vector<ManualPage> manual_pages(const std::vector<CommandText>& commands,
                                     const std::vector<ConfigField>& fields) {
  std::vector<ManualPage> pages;
  for (const CommandText& command : commands)
    pages.push_back({page_name(command.name), page(command, commands, fields)});
  return pages;
}

}  // namespace lockstep
