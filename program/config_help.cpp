#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/program/command_texts.h"
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

}  // namespace

std::string config_help() {
  std::string text =
      "Configuration (text protobuf; `--set PATH=VALUE` takes any of these paths):\n";
  for (const ConfigField& field : config_fields()) {
    text += fmt::format("  {}\n{}{}", field.path, wrapped("(" + facts_of(field) + ")"),
                        wrapped(field.meaning));
  }
  return text;
}

}  // namespace lockstep
