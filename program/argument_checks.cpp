#include "lockstep/program/argument_checks.h"

#include <charconv>
#include <cmath>

#include "lockstep/core/check.h"

namespace lockstep {

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

std::function<std::string(const std::string&)> check_at_least(int64_t minimum) {
  return [minimum](const std::string& text) -> std::string {
    const std::vector<int64_t> found = parse_integers(text, '\0');
    if (found.size() == 1 && found[0] >= minimum) return "";
    return fmt::format("found '{}', allowed: an integer >= {} of 64 bits", text, minimum);
  };
}

std::string check_not_negative(const std::string& text) {
  double found = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, found);
  const bool good = error == std::errc() && after == end && std::isfinite(found) && found >= 0;
  return good ? "" : fmt::format("found '{}', allowed: a finite number >= 0", text);
}

std::string check_path(const std::string& text) {
  return text.empty() ? "found '', allowed: a path" : "";
}

}  // namespace lockstep
