#include "lockstep/program/megatron_flags.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/nearest_name.h"
#include "lockstep/program/megatron_flag_table.h"
#include "lockstep/program/megatron_rules.h"
#include "lockstep/program/megatron_settings.h"

namespace lockstep {
namespace {

std::vector<std::string> known_names() {
  std::vector<std::string> names;
  for (const auto table : {megatron_flags_with_field(), megatron_flags_without_field()})
    for (const MegatronFlag& flag : table)
      if (!flag.name.ends_with('*')) names.emplace_back(flag.name);
  return names;
}

/// "unknown flags '--a', '--num-layer'; did you mean '--num-layers'?"; empty if all are known.
std::string unknown_flags(const std::vector<GivenFlag>& flags) {
  const std::vector<std::string> known = known_names();
  std::vector<std::string> unknown, nearest;
  const auto add = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const GivenFlag& flag : flags) {
    if (find_megatron_flag(flag.name)) continue;
    add(unknown, flag.name);
    for (const std::string& name : nearest_names(flag.name, known)) add(nearest, name);
  }
  if (unknown.empty()) return "";
  return fmt::format("unknown flag{} '{}'{}", unknown.size() == 1 ? "" : "s",
                     fmt::join(unknown, "', '"),
                     did_you_mean(nearest,
                                  "; `lockstep megatron-flags --list` lists those that "
                                  "are known"));
}

void check_values(const GivenFlag& given) {
  const MegatronFlag* const flag = find_megatron_flag(given.name);
  if (!flag) return;
  const size_t count = given.values.size();
  const bool counts = flag->use == FlagUse::copied || flag->use == FlagUse::derived;
  switch (flag->values) {
    case FlagValues::none:
      return require<ConfigError>(count == 0, "{}: found the value '{}', allowed: none", given.name,
                                  count ? given.values[0] : "");
    case FlagValues::one:
      return require<ConfigError>(count == 1, "{}: found {} values, allowed: one", given.name,
                                  count);
    case FlagValues::some:
      return require<ConfigError>(count > 0 || !counts, "{}: found no value, allowed: one or more",
                                  given.name);
  }
}

void apply(const GivenFlag& given, MegatronSettings& settings) {
  const MegatronFlag* const flag = find_megatron_flag(given.name);
  if (!flag) return;
  const std::string field(flag->field), remark(flag->remark);
  switch (flag->use) {
    case FlagUse::copied:
      return settings.copy(given.name, field);
    case FlagUse::sets:
      return settings.set(field, std::string(flag->value));
    case FlagUse::unneeded:
      return settings.note(given.name, "not needed: " + remark);
    case FlagUse::missing:
      return settings.note(given.name, "not there: " + remark);
    case FlagUse::derived:
      return;
  }
}

std::string markdown_row(const MegatronFlag& flag) {
  std::string ours, remark(flag.remark);
  if (!flag.field.empty()) ours = fmt::format("`{}`", flag.field);
  if (flag.use == FlagUse::sets) ours = fmt::format("`{} = {}`", flag.field, flag.value);
  if (flag.use == FlagUse::unneeded) ours = "not needed";
  if (flag.use == FlagUse::missing) ours = "not there";
  return fmt::format("| `{}` | {} | {} |\n", flag.name, ours, remark);
}

}  // namespace

std::vector<GivenFlag> read_megatron_flags(const std::vector<std::string>& words) {
  std::vector<GivenFlag> flags;
  for (const std::string& word : words) {
    if (!word.starts_with("--")) {
      require<ConfigError>(!flags.empty(), "found '{}', allowed first: a flag, as in --num-layers",
                           word);
      flags.back().values.push_back(word);
      continue;
    }
    const size_t equals = word.find('=');
    flags.push_back({word.substr(0, equals), {}});
    if (equals != std::string::npos) flags.back().values.push_back(word.substr(equals + 1));
  }
  for (const GivenFlag& flag : flags) check_values(flag);
  return flags;
}

MegatronConversion convert_megatron_flags(const std::vector<GivenFlag>& flags) {
  MegatronSettings settings(flags);
  for (const MegatronDefault& value : megatron_defaults())
    settings.set(std::string(value.field), std::string(value.value));
  for (const GivenFlag& flag : flags) apply(flag, settings);
  apply_megatron_rules(settings);
  MegatronConversion conversion = settings.result();
  conversion.unknown = unknown_flags(flags);
  return conversion;
}

std::string megatron_flags_markdown() {
  std::string text = "| Megatron-LM | here | remark |\n|---|---|---|\n";
  for (const auto table : {megatron_flags_with_field(), megatron_flags_without_field()})
    for (const MegatronFlag& flag : table) text += markdown_row(flag);
  return text;
}

}  // namespace lockstep
