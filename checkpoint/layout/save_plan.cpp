#include "lockstep/checkpoint/save_plan.h"

#include <algorithm>
#include <charconv>
#include <limits>
#include <map>
#include <numeric>
#include <sstream>
#include <string_view>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

constexpr char kOnOneStage = '!';  ///< in a text, in place of the space

/// The elements of a block that a unit holds.
struct UnitRange {
  int64_t first = 0;
  int64_t last = std::numeric_limits<int64_t>::max();  ///< the default is the whole block
  size_t unit = 0;
};

/// Takes "#first:last" off the end of `key`.
UnitRange take_range(std::string& key, size_t unit) {
  UnitRange range = {.unit = unit};
  const size_t hash = key.rfind('#');
  if (hash == std::string::npos) return range;
  const char* const end = key.data() + key.size();
  int64_t first = 0, last = 0;
  const auto [colon, bad_first] = std::from_chars(key.data() + hash + 1, end, first);
  if (bad_first != std::errc() || colon == end || *colon != ':') return range;
  const auto [rest, bad_last] = std::from_chars(colon + 1, end, last);
  if (bad_last != std::errc() || rest != end) return range;
  key.resize(hash);
  return {first, last, unit};
}

/// The ranges of one block that follow each other, the longest where several begin at one place;
/// all ranges if these do not reach the end.
std::vector<UnitRange> chain(std::vector<UnitRange> ranges) {
  std::sort(ranges.begin(), ranges.end(), [](const UnitRange& a, const UnitRange& b) {
    return a.first != b.first ? a.first < b.first : a.last > b.last;
  });
  int64_t total = 0, end = 0;
  for (const UnitRange& range : ranges) total = std::max(total, range.last);
  std::vector<UnitRange> chosen;
  for (const UnitRange& range : ranges)
    if (range.first == end && range.last > end) {
      chosen.push_back(range);
      end = range.last;
    }
  return end == total ? chosen : ranges;
}

}  // namespace

std::vector<SaveUnit> without_overlaps(const std::vector<SaveUnit>& units) {
  std::map<std::string, std::vector<UnitRange>> blocks;
  for (size_t i = 0; i < units.size(); ++i) {
    std::string block = units[i].key;
    const UnitRange range = take_range(block, i);
    blocks[block].push_back(range);
  }
  std::vector<bool> stays(units.size(), false);
  for (const auto& [block, ranges] : blocks)
    for (const UnitRange& range : chain(ranges)) stays[range.unit] = true;
  std::vector<SaveUnit> rest;
  for (size_t i = 0; i < units.size(); ++i)
    if (stays[i]) rest.push_back(units[i]);
  return rest;
}

std::vector<int64_t> assign_writers(const std::vector<SaveUnit>& units, int64_t world_size) {
  std::vector<size_t> order(units.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const SaveUnit &x = units[a], &y = units[b];
    if (x.holders.size() != y.holders.size()) return x.holders.size() < y.holders.size();
    return x.bytes != y.bytes ? x.bytes > y.bytes : x.key < y.key;
  });
  std::vector<int64_t> load(static_cast<size_t>(world_size), 0);
  std::vector<int64_t> writers(units.size(), 0);
  for (const size_t i : order) {
    const SaveUnit& unit = units[i];
    require<UsageError>(!unit.holders.empty(), "save plan: no rank holds '{}'", unit.key);
    int64_t best = unit.holders.front();
    for (const int64_t rank : unit.holders)
      if (load[static_cast<size_t>(rank)] < load[static_cast<size_t>(best)]) best = rank;
    load[static_cast<size_t>(best)] += unit.bytes;
    writers[i] = best;
  }
  return writers;
}

std::vector<SaveUnit> merge_units(const std::vector<std::vector<HeldUnit>>& held) {
  std::map<std::string, SaveUnit> units;
  for (size_t rank = 0; rank < held.size(); ++rank)
    for (const HeldUnit& unit : held[rank]) {
      SaveUnit& merged = units[unit.key];
      merged.key = unit.key;
      merged.bytes = unit.bytes;
      if (merged.holders.empty() || merged.holders.back() != static_cast<int64_t>(rank))
        merged.holders.push_back(static_cast<int64_t>(rank));
    }
  std::vector<SaveUnit> list;
  for (auto& [key, unit] : units) list.push_back(std::move(unit));
  return list;
}

void check_stages(const std::vector<std::vector<HeldUnit>>& held,
                  const std::vector<int64_t>& stages) {
  std::map<std::string_view, std::pair<size_t, bool>> seen;  // rank and on_one_stage
  for (size_t rank = 0; rank < held.size(); ++rank)
    for (const HeldUnit& unit : held[rank]) {
      const auto [first, is_new] = seen.try_emplace(unit.key, rank, unit.on_one_stage);
      const auto [other, on_one_stage] = first->second;
      if (is_new || !(unit.on_one_stage || on_one_stage)) continue;
      require<UsageError>(other != rank,
                          "checkpoint: tensor '{}': found twice on rank {}, allowed: once; two "
                          "model chunks need names of their own for their parameters",
                          unit.key, rank);
      require<UsageError>(
          stages[other] == stages[rank],
          "checkpoint: tensor '{}': found on rank {} of pipeline stage {} and on rank {} of "
          "pipeline stage {}, allowed: one stage; parameters of different stages need names of "
          "their own, and copies of one parameter a description that says so "
          "(ParamDescription::stages or ParamDescription::tie)",
          unit.key, other, stages[other], rank, stages[rank]);
    }
}

std::string format_held_units(const std::vector<HeldUnit>& units) {
  std::string text;
  for (const HeldUnit& unit : units)
    text += fmt::format("{}{}{}\n", unit.bytes, unit.on_one_stage ? kOnOneStage : ' ', unit.key);
  return text;
}

std::vector<HeldUnit> parse_held_units(const std::string& text) {
  std::vector<HeldUnit> units;
  std::istringstream lines(text);
  for (HeldUnit unit; lines >> unit.bytes;) {
    const int separator = lines.get();
    unit.on_one_stage = separator == kOnOneStage;
    if ((separator != ' ' && !unit.on_one_stage) || !std::getline(lines, unit.key)) break;
    units.push_back(unit);
  }
  require<FileError>(lines.eof(), "a rank's list of what it holds is damaged after {} entries",
                     units.size());
  return units;
}

}  // namespace lockstep
