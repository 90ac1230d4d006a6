#include "lockstep/training/cli/plan_arguments.h"

#include <charconv>
#include <iostream>

#include "lockstep/core/check.h"

namespace lockstep {

std::string given(const CLI::App& command) {
  std::string text = "plan " + command.get_name();
  for (const CLI::Option* option : command.parse_order()) {
    text += " " + option->get_name();
    if (option->get_items_expected_max() > 0)
      text += fmt::format(" {}", fmt::join(option->results(), ","));
  }
  return text;
}

std::vector<int64_t> parse_integers(const std::string& text, char separator) {
  std::vector<int64_t> result;
  for (const char *next = text.data(), *end = next + text.size();; ++next) {
    const auto [after, error] = std::from_chars(next, end, result.emplace_back());
    if (error != std::errc() || (after != end && *after != separator)) return {};
    if (after == end) return result;
    next = after;
  }
}

std::string check_integer(const std::string& text) {
  const bool good = parse_integers(text, '\0').size() == 1;
  return good ? "" : fmt::format("found '{}', allowed: an integer of 64 bits", text);
}

std::string check_integers(const std::string& text) {
  const bool good = !parse_integers(text, ',').empty();
  return good ? "" : fmt::format("found '{}', allowed: integers of 64 bits, as in 2,4", text);
}

void flush_output(const CLI::App& command) {
  require<FileError>(std::cout.flush().good(), "plan {}: standard output cannot be written",
                     command.get_name());
}

}  // namespace lockstep
