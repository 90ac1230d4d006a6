#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/program/commands.h"

namespace lockstep {
namespace {

/// `text` in lines of 76 characters, indented.
std::string wrapped(const std::string& text) {
  constexpr size_t kWidth = 76;
  std::string result, line;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (!line.empty() && line.size() + word.size() + 1 > kWidth) {
      result += "    " + line + "\n";
      line.clear();
    }
    line += (line.empty() ? "" : " ") + word;
  }
  return result + "    " + line + "\n";
}

/// A line break as "\\n".
std::string printed(const std::string& value) {
  std::string text;
  for (const char c : value) text += c == '\n' ? "\\n" : std::string(1, c);
  return text;
}

}  // namespace

std::string config_help() {
  std::string text =
      "Configuration (text protobuf; `--set PATH=VALUE` takes any of these paths):\n";
  for (const ConfigField& field : config_fields()) {
    std::string facts = field.type;
    if (!field.unit.empty()) facts += ", in " + field.unit;
    if (!field.allowed.empty()) facts += ", " + field.allowed;
    if (!field.default_value.empty()) facts += ", default " + printed(field.default_value);
    if (!field.unset.empty()) facts += ", unset: " + field.unset;
    text +=
        fmt::format("  {}\n{}{}", field.path, wrapped("(" + facts + ")"), wrapped(field.meaning));
  }
  return text;
}

}  // namespace lockstep
