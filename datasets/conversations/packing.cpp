#include "lockstep/datasets/packing.h"

#include <algorithm>
#include <set>
#include <tuple>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

std::span<const int64_t> Packing::of_bin(int64_t bin) const {
  const auto begin = static_cast<size_t>(begins[static_cast<size_t>(bin)]);
  const auto end = static_cast<size_t>(begins[static_cast<size_t>(bin) + 1]);
  return std::span(items).subspan(begin, end - begin);
}

Packing pack_best_fit(std::span<const int64_t> lengths, std::span<const int64_t> order,
                      int64_t room) {
  const auto length = [&](int64_t item) { return lengths[static_cast<size_t>(item)]; };
  std::vector<int64_t> longest_first(order.begin(), order.end());
  for (const int64_t item : longest_first)
    require<UsageError>(length(item) >= 1 && length(item) <= room,
                        "pack_best_fit: found a length of {}, allowed: 1 to {}", length(item),
                        room);
  std::stable_sort(longest_first.begin(), longest_first.end(),
                   [&](int64_t a, int64_t b) { return length(a) > length(b); });
  std::vector<std::vector<int64_t>> bins;
  std::set<std::pair<int64_t, size_t>> open;  // room that is left, bin
  for (const int64_t item : longest_first) {
    const auto best = open.lower_bound({length(item), 0});
    size_t bin = bins.size();
    int64_t left = room;
    if (best == open.end()) {
      bins.emplace_back();
    } else {
      std::tie(left, bin) = *best;
      open.erase(best);
    }
    bins[bin].push_back(item);
    left -= length(item);
    if (left > 0) open.emplace(left, bin);
  }
  Packing packing;
  packing.items.reserve(longest_first.size());
  for (const std::vector<int64_t>& bin : bins) {
    packing.items.insert(packing.items.end(), bin.begin(), bin.end());
    packing.begins.push_back(static_cast<int64_t>(packing.items.size()));
  }
  return packing;
}

}  // namespace lockstep
