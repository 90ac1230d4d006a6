#include "lockstep/program/argument_checks.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/core/config_rules.h"

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

namespace {

/// CLI11 reads numbers that begin with 0 as octal.
bool is_octal(const std::string& text) {
  const size_t first = text.starts_with('-') ? 1 : 0;
  return text.size() > first + 1 && text[first] == '0';
}

/// The decimal integer, if all of `text` is one.
std::optional<int64_t> parse_integer(const std::string& text) {
  const std::vector<int64_t> found = parse_integers(text, '\0');
  if (found.size() != 1 || is_octal(text)) return {};
  return found.front();
}

/// A message with what was found, and `allowed`.
std::string refusal(const std::string& text, const std::string& allowed) {
  return fmt::format("found '{}', allowed: {}{}", text, allowed,
                     is_octal(text) ? ", without leading zeros" : "");
}

}  // namespace

std::string check_integer(const std::string& text) {
  return parse_integer(text) ? "" : refusal(text, "an integer of 64 bits");
}

std::string check_integers(const std::string& text) {
  const bool good = !parse_integers(text, ',').empty();
  return good ? "" : fmt::format("found '{}', allowed: integers of 64 bits, as in 2,4", text);
}

std::function<std::string(const std::string&)> check_at_least(int64_t minimum) {
  return [minimum](const std::string& text) -> std::string {
    const std::optional<int64_t> found = parse_integer(text);
    if (found && *found >= minimum) return "";
    return refusal(text, fmt::format("an integer >= {} of 64 bits", minimum));
  };
}

std::function<std::string(const std::string&)> check_between(int64_t minimum, int64_t maximum) {
  return [minimum, maximum](const std::string& text) -> std::string {
    const std::optional<int64_t> found = parse_integer(text);
    if (found && *found >= minimum && *found <= maximum) return "";
    return refusal(text, fmt::format("an integer from {} to {}", minimum, maximum));
  };
}

std::string check_seed(const std::string& text) {
  const std::optional<int64_t> found = parse_integer(text);
  if (found && *found >= 0) return "";
  return refusal(text, fmt::format("an integer >= 0 and <= {}", kLargestSeed));
}

std::function<std::string(const std::string&)> check_one_of(std::vector<std::string> allowed) {
  return [allowed = std::move(allowed)](const std::string& text) -> std::string {
    if (std::find(allowed.begin(), allowed.end(), text) != allowed.end()) return "";
    return fmt::format("found '{}', allowed: {}", text, fmt::join(allowed, ", "));
  };
}

namespace {

/// The finite number, if all of `text` is one.
std::optional<double> parse_number(const std::string& text) {
  double found = 0;
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, found);
  if (error != std::errc() || after != end || !std::isfinite(found)) return {};
  return found;
}

}  // namespace

std::string check_not_negative(const std::string& text) {
  const bool good = parse_number(text).value_or(-1) >= 0;
  return good ? "" : fmt::format("found '{}', allowed: a finite number >= 0", text);
}

std::string check_positive(const std::string& text) {
  const bool good = parse_number(text).value_or(0) > 0;
  return good ? "" : fmt::format("found '{}', allowed: a finite number > 0", text);
}

std::string check_probability(const std::string& text) {
  const double found = parse_number(text).value_or(0);
  const bool good = found > 0 && found <= 1;
  return good ? "" : fmt::format("found '{}', allowed: a number > 0 and <= 1", text);
}

std::string check_timeout(const std::string& text) {
  const double found = parse_number(text).value_or(0);
  const bool good = found >= kShortestTimeout && found <= kLongestTimeout;
  return good
             ? ""
             : fmt::format("found '{}', allowed: a number of seconds from {} to {:.0f} (100 years)",
                           text, kShortestTimeout, kLongestTimeout);
}

std::string check_path(const std::string& text) {
  return text.empty() ? "found '', allowed: a path" : "";
}

}  // namespace lockstep
