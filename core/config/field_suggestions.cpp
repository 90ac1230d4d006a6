#include "lockstep/core/field_suggestions.h"

#include <algorithm>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/core/nearest_name.h"

namespace lockstep {
namespace {

constexpr size_t kMostSuggestions = 3;
constexpr size_t kShortestPart = 4;

/// "model" and "num_layers" of "model.num_layers"; the group is empty in "num_layers".
std::pair<std::string_view, std::string_view> group_and_name(std::string_view path) {
  const size_t dot = path.find('.');
  if (dot == std::string_view::npos) return {"", path};
  return {path.substr(0, dot), path.substr(dot + 1)};
}

/// A cost that is too high.
constexpr size_t kFar = std::numeric_limits<size_t>::max();

/// The paths for which cost(group, name) is smallest.
template <class Cost>
std::vector<std::string> cheapest(Cost cost) {
  std::vector<std::string> best;
  size_t least = kFar;
  for (const ConfigField& field : config_fields()) {
    const auto [group, name] = group_and_name(field.path);
    const size_t found = cost(group, name);
    if (found < least) best.clear();
    least = std::min(least, found);
    if (found == least && found != kFar && best.size() < kMostSuggestions)
      best.push_back(field.path);
  }
  return best;
}

std::vector<std::string> group_names() {
  std::vector<std::string> names;
  for (const ConfigField& field : config_fields()) {
    const std::string group(group_and_name(field.path).first);
    if (names.empty() || names.back() != group) names.push_back(group);
  }
  return names;
}

std::vector<std::string> suggestions(const std::string& path) {
  const auto [wanted_group, wanted] = group_and_name(path);
  const auto group_distance = [g = wanted_group](std::string_view group) -> size_t {
    if (g.empty()) return 0;
    return is_near(g, group) ? edit_distance(g, group) : kFar;
  };
  if (auto same = cheapest([&, w = wanted](std::string_view group, std::string_view name) {
        return w == name ? edit_distance(wanted_group, group) : kFar;
      });
      !same.empty())
    return same;
  if (wanted_group.empty())
    if (auto groups = nearest_names(wanted, group_names()); !groups.empty()) return groups;
  if (auto near = cheapest([&, w = wanted](std::string_view group, std::string_view name) {
        const size_t far = group_distance(group);
        return far == kFar || !is_near(w, name) ? kFar : far + edit_distance(w, name);
      });
      !near.empty())
    return near;
  if (wanted.size() < kShortestPart) return {};
  return cheapest([&, w = wanted](std::string_view group, std::string_view name) {
    return name.find(w) == std::string_view::npos ? kFar : group_distance(group);
  });
}

}  // namespace

std::string unknown_field(const std::string& path) {
  return "unknown field '" + path + "'" +
         did_you_mean(suggestions(path), "; `lockstep train --help` lists all fields");
}

}  // namespace lockstep
