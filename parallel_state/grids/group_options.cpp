#include "lockstep/parallel_state/group_options.h"

#include <charconv>
#include <cmath>
#include <set>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr char kField[] = "parallel.group_options";
constexpr int64_t kMostCtas = 1024;
constexpr int64_t kLargestCluster = 8;
constexpr double kLongestSeconds = 1e6;

std::string trim(const std::string& text) {
  const auto first = text.find_first_not_of(' ');
  if (first == std::string::npos) return "";
  return text.substr(first, text.find_last_not_of(' ') - first + 1);
}

GroupKind parse_kind(const std::string& name, const std::string& text) {
  std::string names;
  for (const GroupKind kind : all_group_kinds()) {
    if (name == to_string(kind)) return kind;
    names += (names.empty() ? "" : ", ") + std::string(to_string(kind));
  }
  fail<ConfigError>(
      "{}: found '{}', which starts with no kind of groups; allowed: {}, then a colon", kField,
      text, names);
}

/// One "name=value".
class Setting {
 public:
  Setting(const std::string& setting, const std::string& text) : text_(text) {
    const auto equals = setting.find('=');
    name_ = trim(setting.substr(0, equals));
    if (equals != std::string::npos) value_ = trim(setting.substr(equals + 1));
  }

  const std::string& name() const { return name_; }

  int64_t integer(int64_t least, int64_t most) const {
    int64_t number = 0;
    check(parse(number) && number >= least && number <= most,
          fmt::format("a whole number from {} to {}", least, most));
    return number;
  }

  std::chrono::milliseconds seconds() const {
    double number = 0;
    check(parse(number) && number >= 0.001 && number <= kLongestSeconds,
          fmt::format("seconds from 0.001 to {}", kLongestSeconds));
    return std::chrono::milliseconds(std::llround(number * 1e3));
  }

  bool flag() const {
    check(value_ == "true" || value_ == "false", "true, false");
    return value_ == "true";
  }

  void check(bool good, const std::string& allowed) const {
    require<ConfigError>(good, "{}: in '{}', {}: found '{}', allowed: {}", kField, text_, name_,
                         value_, allowed);
  }

 private:
  template <class Number>
  bool parse(Number& number) const {
    const char* const end = value_.data() + value_.size();
    const auto result = std::from_chars(value_.data(), end, number);
    return result.ec == std::errc() && result.ptr == end;
  }

  const std::string& text_;
  std::string name_;
  std::string value_;
};

void apply(const Setting& setting, const std::string& text, GroupOptions& options) {
  const std::string& name = setting.name();
  if (name == "timeout_seconds") {
    options.timeout = setting.seconds();
  } else if (name == "high_priority_stream") {
    options.high_priority_stream = setting.flag();
  } else if (name == "min_ctas") {
    options.min_ctas = setting.integer(1, kMostCtas);
  } else if (name == "max_ctas") {
    options.max_ctas = setting.integer(1, kMostCtas);
  } else if (name == "cga_cluster_size") {
    options.cga_cluster_size = setting.integer(0, kLargestCluster);
  } else {
    fail<ConfigError>(
        "{}: in '{}', found '{}', allowed: timeout_seconds, high_priority_stream, min_ctas, "
        "max_ctas, cga_cluster_size, each with = and a value",
        kField, text, name);
  }
}

GroupOptions parse_options(const std::string& list, const std::string& text) {
  GroupOptions options;
  std::set<std::string> given;
  for (size_t at = 0; at <= list.size();) {
    const size_t comma = std::min(list.find(',', at), list.size());
    const Setting setting(list.substr(at, comma - at), text);
    apply(setting, text, options);
    require<ConfigError>(given.insert(setting.name()).second,
                         "{}: in '{}', {} is given twice, allowed: once", kField, text,
                         setting.name());
    at = comma + 1;
  }
  require<ConfigError>(
      !options.min_ctas || !options.max_ctas || *options.min_ctas <= *options.max_ctas,
      "{}: in '{}', min_ctas: found {}, allowed: <= max_ctas ({})", kField, text,
      options.min_ctas.value_or(0), options.max_ctas.value_or(0));
  return options;
}

}  // namespace

std::string to_string(const GroupOptions& options) {
  std::string text;
  const auto add = [&](const char* name, const std::string& value) {
    text += fmt::format("{}{}={}", text.empty() ? "" : ", ", name, value);
  };
  const auto add_number = [&](const char* name, const std::optional<int64_t>& value) {
    if (value) add(name, std::to_string(*value));
  };
  if (options.timeout)
    add("timeout_seconds", fmt::format("{}", static_cast<double>(options.timeout->count()) / 1e3));
  if (options.high_priority_stream) add("high_priority_stream", "true");
  add_number("min_ctas", options.min_ctas);
  add_number("max_ctas", options.max_ctas);
  add_number("cga_cluster_size", options.cga_cluster_size);
  return text;
}

std::map<GroupKind, GroupOptions> parse_group_options(const std::vector<std::string>& texts) {
  std::map<GroupKind, GroupOptions> options;
  for (const std::string& text : texts) {
    const auto colon = text.find(':');
    const GroupKind kind = parse_kind(trim(text.substr(0, colon)), text);
    require<ConfigError>(colon != std::string::npos,
                         "{}: found '{}', allowed: options after a colon, as in {}: max_ctas=16",
                         kField, text, to_string(kind));
    require<ConfigError>(options.emplace(kind, parse_options(text.substr(colon + 1), text)).second,
                         "{}: {} is given twice, allowed: once", kField, to_string(kind));
  }
  return options;
}

}  // namespace lockstep
