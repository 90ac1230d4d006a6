#include "lockstep/program/megatron_settings.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <string_view>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

template <class Number>
std::optional<Number> parsed(const std::string& text) {
  Number number{};
  const char* const end = text.data() + text.size();
  const auto [after, error] = std::from_chars(text.data(), end, number);
  return error == std::errc() && after == end ? std::optional(number) : std::nullopt;
}

/// Megatron-LM has whole numbers in floating-point fields, such as 1000.0.
std::optional<int64_t> parsed_integer(const std::string& text) {
  if (const auto integer = parsed<int64_t>(text)) return integer;
  const auto number = parsed<double>(text);
  if (!number || *number != std::floor(*number) || std::abs(*number) > 1e15) return std::nullopt;
  return static_cast<int64_t>(*number);
}

/// `text` between quotes, for a text protobuf.
std::string quoted_string(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    result += c;
  }
  return result + "\"";
}

std::string group_of(const std::string& path) { return path.substr(0, path.find('.')); }

}  // namespace

const ConfigField& config_field(const std::string& path) {
  const auto& fields = config_fields();
  return *std::find_if(fields.begin(), fields.end(),
                       [&](const ConfigField& field) { return field.path == path; });
}

MegatronSettings::MegatronSettings(const std::vector<GivenFlag>& flags) {
  for (const GivenFlag& flag : flags) flags_[flag.name] = flag.values;
}

std::optional<std::string> MegatronSettings::value(const std::string& flag) const {
  const auto found = flags_.find(flag);
  return found == flags_.end() || found->second.empty() ? std::nullopt
                                                        : std::optional(found->second[0]);
}

void MegatronSettings::exclude(const std::string& one, const std::string& other) const {
  require<ConfigError>(!has(one) || !has(other), "{} and {}: allowed: one of the two", one, other);
}

std::optional<int64_t> MegatronSettings::integer(const std::string& flag) const {
  const auto text = value(flag);
  if (!text) return std::nullopt;
  const auto integer = parsed_integer(*text);
  require<ConfigError>(integer.has_value(), "{}: found '{}', allowed: a whole number", flag, *text);
  return integer;
}

std::optional<double> MegatronSettings::number(const std::string& flag) const {
  const auto text = value(flag);
  if (!text) return std::nullopt;
  const auto number = parsed<double>(*text);
  require<ConfigError>(number.has_value(), "{}: found '{}', allowed: a number", flag, *text);
  return number;
}

void MegatronSettings::set_list(const std::string& field, std::vector<std::string> values) {
  fields_[field] = std::move(values);
}

std::optional<std::string> MegatronSettings::found(const std::string& field) const {
  const auto at = fields_.find(field);
  return at == fields_.end() ? std::nullopt : std::optional(at->second[0]);
}

void MegatronSettings::copy(const std::string& flag, const std::string& field) {
  constexpr std::string_view kChoices = "one of ";
  const ConfigField& row = config_field(field);
  const std::string text = values(flag)[0];
  if (values(flag).size() > 1) return note(flag, "not there: one value is allowed for " + field);
  if (row.type == "int64") return set(field, *integer(flag));
  if (row.type == "double") return set(field, fmt::format("{}", *number(flag)));
  if (row.allowed.starts_with(kChoices)) {
    const std::string choices = ", " + row.allowed.substr(kChoices.size()) + ", ";
    if (choices.find(", " + text + ", ") == std::string::npos)
      return note(flag, fmt::format("not there: found '{}', allowed for {}: {}", text, field,
                                    row.allowed.substr(kChoices.size())));
  }
  set(field, text);
}

void MegatronSettings::note(const std::string& flag, const std::string& text) {
  notes_.push_back(flag + ": " + text);
}

MegatronConversion MegatronSettings::result() const {
  std::string text = "# Made from Megatron-LM's flags by `lockstep megatron-flags`.\n", group;
  for (const ConfigField& field : config_fields()) {
    const auto found = fields_.find(field.path);
    if (found == fields_.end()) continue;
    if (group != group_of(field.path))
      text += (group.empty() ? "" : "}\n") + group_of(field.path) + " {\n";
    group = group_of(field.path);
    for (const std::string& value : found->second)
      text += fmt::format("  {}: {}\n", field.path.substr(group.size() + 1),
                          field.type == "string" ? quoted_string(value) : value);
  }
  return {group.empty() ? text : text + "}\n", notes_};
}

}  // namespace lockstep
