#include "lockstep/optimizer/param_groups.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <string_view>
#include <tuple>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

struct Field {
  const char* name;
  std::optional<double> ParamOverride::*in_override;
  double ParamGroup::*in_group;
};

constexpr std::array<Field, 3> kFields = {
    {{"max_lr", &ParamOverride::max_lr, &ParamGroup::max_lr},
     {"min_lr", &ParamOverride::min_lr, &ParamGroup::min_lr},
     {"wd_mult", &ParamOverride::wd_mult, &ParamGroup::wd_mult}}};

struct NamedOverride {
  std::string name;
  ParamOverride values;
  bool may_be_idle = false;  ///< may apply to nothing
};

bool is_like(std::string_view text, std::string_view pattern) {
  size_t t = 0, p = 0, retry_at = 0;
  std::optional<size_t> star;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      retry_at = t;
    } else if (p < pattern.size() && (pattern[p] == '?' || pattern[p] == text[t])) {
      ++p;
      ++t;
    } else if (star) {
      p = *star + 1;
      t = ++retry_at;
    } else {
      return false;
    }
  }
  return pattern.find_first_not_of('*', p) == std::string_view::npos;
}

std::vector<NamedOverride> all_overrides(const OptimizerConfig& config,
                                         const std::vector<ParamOverride>& overrides) {
  std::vector<NamedOverride> all = {
      {.name = "optimizer.decoupled_lr",
       .values = {.applies_to =
                      [](const NamedParameter& param) {
                        return param.description.is_embedding_or_output;
                      },
                  .max_lr = config.decoupled_lr,
                  .min_lr = config.decoupled_min_lr},
       .may_be_idle = true}};
  for (size_t i = 0; i < overrides.size(); ++i)
    all.push_back({fmt::format("override {} of {}", i + 1, overrides.size()), overrides[i]});
  for (const auto& [name, values, may_be_idle] : all) {
    require<ConfigError>(values.applies_to != nullptr, "optimizer, {}: applies_to is empty", name);
    for (const Field& field : kFields) {
      const double value = (values.*field.in_override).value_or(0);
      require<ConfigError>(std::isfinite(value) && value >= 0,
                           "optimizer, {}: {}: found {}, allowed: >= 0", name, field.name, value);
    }
  }
  return all;
}

ParamGroup settings_of(const NamedParameter& param, const OptimizerConfig& config,
                       const std::vector<const NamedOverride*>& overrides) {
  ParamGroup settings = {.max_lr = config.lr,
                         .min_lr = config.min_lr,
                         .wd_mult = param.description.apply_weight_decay ? 1.0 : 0.0};
  for (const Field& field : kFields) {
    const NamedOverride* first = nullptr;
    for (const NamedOverride* override : overrides) {
      const std::optional<double>& value = override->values.*field.in_override;
      if (!value) continue;
      double& chosen = settings.*field.in_group;
      require<ConfigError>(!first || *value == chosen,
                           "optimizer: parameter '{}': {} is set to {} by {} and to {} by {}; the "
                           "overrides must agree",
                           param.name, field.name, chosen, first ? first->name : "", *value,
                           override->name);
      chosen = *value;
      first = override;
    }
  }
  require<ConfigError>(settings.min_lr <= settings.max_lr,
                       "optimizer: parameter '{}': min_lr: found {}, allowed: <= max_lr ({})",
                       param.name, settings.min_lr, settings.max_lr);
  return settings;
}

}  // namespace

std::function<bool(const NamedParameter&)> matches_name(std::vector<std::string> patterns) {
  return [patterns = std::move(patterns)](const NamedParameter& param) {
    return std::any_of(patterns.begin(), patterns.end(),
                       [&](const std::string& pattern) { return is_like(param.name, pattern); });
  };
}

GroupedParams group_params(const std::vector<NamedParameter>& params, const OptimizerConfig& config,
                           const std::vector<ParamOverride>& overrides, ListedParams listed) {
  const std::vector<NamedOverride> all = all_overrides(config, overrides);
  const auto key_of = [&](const ParamGroup& group) {
    const bool is_default =
        group.max_lr == config.lr && group.min_lr == config.min_lr && group.wd_mult == 1;
    return std::tuple(!is_default, group.max_lr, group.min_lr, group.wd_mult);
  };
  const ParamGroup first = {.max_lr = config.lr, .min_lr = config.min_lr};
  std::map<std::tuple<bool, double, double, double>, std::vector<size_t>> members;
  std::vector<bool> idle(all.size(), true);
  members[key_of(first)] = {};
  for (size_t i = 0; i < params.size(); ++i) {
    std::vector<const NamedOverride*> applied;
    for (size_t k = 0; k < all.size(); ++k)
      if (all[k].values.applies_to(params[i])) {
        applied.push_back(&all[k]);
        idle[k] = false;
      }
    members[key_of(settings_of(params[i], config, applied))].push_back(i);
  }
  for (size_t k = 0; k < all.size(); ++k)
    require<ConfigError>(!idle[k] || all[k].may_be_idle || listed == ListedParams::some,
                         "optimizer, {}: applies to none of the {} parameters, such as '{}'",
                         all[k].name, params.size(), params.empty() ? "" : params.front().name);
  GroupedParams grouped = {.groups = {}, .group_of = std::vector<size_t>(params.size())};
  for (const auto& [key, indices] : members) {
    const auto& [other, max_lr, min_lr, wd_mult] = key;
    ParamGroup& group = grouped.groups.emplace_back(
        ParamGroup{.max_lr = max_lr, .min_lr = min_lr, .wd_mult = wd_mult, .lr = max_lr});
    for (const size_t i : indices) {
      group.names.push_back(params[i].name);
      grouped.group_of[i] = grouped.groups.size() - 1;
    }
  }
  return grouped;
}

std::string to_string(const ParamGroup& group) {
  std::string text;
  for (const Field& field : kFields)
    text += fmt::format("{}{} {}", text.empty() ? "" : ", ", field.name, group.*field.in_group);
  return text;
}

std::string name_of(const ParamGroup& group, const ParamGroup& first) {
  std::string text;
  for (const Field& field : kFields)
    if (group.*field.in_group != first.*field.in_group)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", field.name, group.*field.in_group);
  return text.empty() ? "default" : text;
}

}  // namespace lockstep
