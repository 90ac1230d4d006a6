#include "lockstep/training/trace_clocks.h"

#include <algorithm>
#include <deque>
#include <string_view>
#include <utility>

namespace lockstep {
namespace {

using HostPair = std::pair<size_t, size_t>;

constexpr std::string_view kJoint[] = {"all_reduce", "reduce_scatter", "all_gather", "all_to_all"};
constexpr std::string_view kOverGroup = " over group ";

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

/// The ranks' hosts as numbers, in order of first appearance.
std::vector<size_t> number_hosts(const std::vector<TraceClock>& clocks) {
  std::map<std::string, size_t> numbers;
  std::vector<size_t> hosts;
  for (const TraceClock& clock : clocks)
    hosts.push_back(numbers.try_emplace(clock.host, numbers.size()).first->second);
  return hosts;
}

/// For each name, the first rank on each host that has it.
std::map<std::string, std::map<size_t, size_t>> ranks_by_name(const std::vector<TraceClock>& clocks,
                                                              const std::vector<size_t>& hosts) {
  std::map<std::string, std::map<size_t, size_t>> ranks;
  for (size_t rank = 0; rank < clocks.size(); ++rank)
    for (const auto& [name, ends] : clocks[rank].ends) ranks[name].try_emplace(hosts[rank], rank);
  return ranks;
}

/// How far the second host of a pair is ahead of the first, by each collective of both.
std::map<HostPair, std::vector<double>> differences(const std::vector<TraceClock>& clocks,
                                                    const std::vector<size_t>& hosts) {
  std::map<HostPair, std::vector<double>> found;
  for (const auto& [name, ranks] : ranks_by_name(clocks, hosts)) {
    const auto [first_host, first_rank] = *ranks.begin();
    const std::vector<double>& first = clocks[first_rank].ends.at(name);
    for (const auto& [host, rank] : ranks) {
      const std::vector<double>& other = clocks[rank].ends.at(name);
      if (host == first_host || other.size() != first.size()) continue;
      for (size_t i = 0; i < first.size(); ++i)
        found[{first_host, host}].push_back(other[i] - first[i]);
    }
  }
  return found;
}

}  // namespace

bool ends_everywhere_at_once(const std::string& name) {
  const bool joint = std::any_of(std::begin(kJoint), std::end(kJoint), [&](std::string_view begin) {
    return std::string_view(name).substr(0, begin.size()) == begin;
  });
  return joint && name.find(kOverGroup) != name.npos;
}

std::vector<std::optional<double>> clock_offsets(const std::vector<TraceClock>& clocks) {
  const std::vector<size_t> hosts = number_hosts(clocks);
  std::map<size_t, std::map<size_t, double>> ahead;
  for (const auto& [pair, values] : differences(clocks, hosts)) {
    const double middle = median(values);
    ahead[pair.first][pair.second] = middle;
    ahead[pair.second][pair.first] = -middle;
  }
  std::map<size_t, double> known = {{0, 0.0}};
  for (std::deque<size_t> todo = {0}; !todo.empty(); todo.pop_front())
    for (const auto& [host, offset] : ahead[todo.front()])
      if (known.try_emplace(host, known.at(todo.front()) + offset).second) todo.push_back(host);
  std::vector<std::optional<double>> offsets;
  for (const size_t host : hosts) {
    const auto found = known.find(host);
    offsets.push_back(found == known.end() ? std::nullopt : std::optional(found->second));
  }
  return offsets;
}

}  // namespace lockstep
