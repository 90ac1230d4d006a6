#include "lockstep/program/megatron_flags.h"

#include "lockstep/core/check.h"
#include "lockstep/core/nearest_name.h"
#include "lockstep/program/megatron_flag_table.h"
#include "lockstep/program/megatron_rules.h"
#include "lockstep/program/megatron_settings.h"

namespace lockstep {
namespace {

const MegatronFlag& known_flag(const std::string& name) {
  if (const MegatronFlag* const flag = find_megatron_flag(name)) return *flag;
  std::vector<std::string> names;
  for (const auto table : {megatron_flags_with_field(), megatron_flags_without_field()})
    for (const MegatronFlag& flag : table)
      if (!flag.name.ends_with('*')) names.emplace_back(flag.name);
  fail<ConfigError>("unknown flag '{}'{}", name,
                    did_you_mean(nearest_names(name, names),
                                 "; `lockstep megatron-flags --list` lists those that are known"));
}

void check_values(const GivenFlag& given) {
  const MegatronFlag& flag = known_flag(given.name);
  const size_t count = given.values.size();
  const bool counts = flag.use == FlagUse::copied || flag.use == FlagUse::derived;
  switch (flag.values) {
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
  const MegatronFlag& flag = known_flag(given.name);
  const std::string field(flag.field), remark(flag.remark);
  switch (flag.use) {
    case FlagUse::copied:
      return settings.copy(given.name, field);
    case FlagUse::sets:
      return settings.set(field, std::string(flag.value));
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
  return settings.result();
}

std::string megatron_flags_markdown() {
  std::string text = "| Megatron-LM | here | remark |\n|---|---|---|\n";
  for (const auto table : {megatron_flags_with_field(), megatron_flags_without_field()})
    for (const MegatronFlag& flag : table) text += markdown_row(flag);
  return text;
}

}  // namespace lockstep
