#include "lockstep/training/checkpoint/save_plan.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>

#include "lockstep/core/check.h"

namespace lockstep {

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
    require<UsageError>(!unit.holders.empty(), "save plan: nobody holds '{}'", unit.key);
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

std::string format_held_units(const std::vector<HeldUnit>& units) {
  std::string text;
  for (const HeldUnit& unit : units) text += fmt::format("{} {}\n", unit.bytes, unit.key);
  return text;
}

std::vector<HeldUnit> parse_held_units(const std::string& text) {
  std::vector<HeldUnit> units;
  std::istringstream lines(text);
  for (HeldUnit unit; lines >> unit.bytes && lines.get() == ' ' && std::getline(lines, unit.key);)
    units.push_back(unit);
  require<FileError>(lines.eof(), "a rank's list of what it holds is damaged after {} entries",
                     units.size());
  return units;
}

}  // namespace lockstep
