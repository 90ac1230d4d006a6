#include "lockstep/program/shell_expansion.h"

#include <algorithm>
#include <cctype>

namespace lockstep {
namespace {

bool is_digit(char c) { return std::isdigit(static_cast<unsigned char>(c)) != 0; }
bool is_of_name(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

/// The length of the name of a variable or of one of $@, $* and $1, at the start of the text.
size_t name_length(std::string_view text) {
  if (text.starts_with('@') || text.starts_with('*')) return 1;
  const bool is_number = !text.empty() && is_digit(text[0]);
  const auto end = std::find_if_not(text.begin(), text.end(), is_number ? is_digit : is_of_name);
  return static_cast<size_t>(end - text.begin());
}

/// The first place after `at` where as many brackets are closed as opened, from text[at] on.
size_t end_of_brackets(std::string_view text, size_t at) {
  int depth = 0;
  for (; at < text.size(); ++at) {
    depth += text[at] == '(' ? 1 : text[at] == ')' ? -1 : 0;
    if (depth == 0) return at + 1;
  }
  return at;
}

/// The place of the } that closes ${; `at` is behind that.
size_t closing_brace(std::string_view text, size_t at) {
  for (int depth = 0; at < text.size(); ++at) {
    if (text[at] == '}' && depth-- == 0) return at;
    if (text[at] == '\\')
      ++at;
    else if (text.substr(at).starts_with("${"))
      ++depth;
  }
  return text.size();
}

/// Fills in the parts of what stands between braces; without a name if it is none of the known.
void read_parts(std::string_view inside, ShellExpansion& result) {
  const std::string_view name = inside.substr(0, name_length(inside));
  inside.remove_prefix(name.size());
  if (inside.starts_with('[')) {
    const size_t end = inside.find(']');
    if (end == std::string_view::npos) return;
    result.index = inside.substr(1, end - 1);
    inside.remove_prefix(end + 1);
  }
  if (!inside.empty()) {
    result.colon = inside[0] == ':';
    inside.remove_prefix(result.colon ? 1 : 0);
    const bool is_operator =
        !inside.empty() && std::string_view("-=+?").find(inside[0]) != std::string_view::npos;
    if (is_operator) result.operation = inside[0];
    if (is_operator) result.word = inside.substr(1);
    if (!is_operator && name != "@" && name != "*") return;  // ${@:2} has no more than ${@}
  }
  result.name = name;
}

}  // namespace

bool is_shell_name(std::string_view text) {
  return !text.empty() && !is_digit(text[0]) && std::all_of(text.begin(), text.end(), is_of_name);
}

ShellExpansion read_shell_expansion(std::string_view text, size_t& at) {
  ShellExpansion result;
  const size_t begin = at++;
  const std::string_view rest = text.substr(at);
  if (rest.starts_with('{')) {
    const size_t end = closing_brace(text, at + 1);
    read_parts(text.substr(at + 1, end - at - 1), result);
    at = std::min(end + 1, text.size());
  } else if (rest.starts_with('(')) {
    at = end_of_brackets(text, at);
  } else {
    const size_t length = name_length(rest);
    result.name = rest.substr(0, rest.empty() || !is_digit(rest[0]) ? length : 1);
    at += result.name.size();
  }
  result.written = text.substr(begin, at - begin);
  return result;
}

}  // namespace lockstep
