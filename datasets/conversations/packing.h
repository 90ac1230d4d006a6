#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lockstep {

/// Which items are in which bin.
struct Packing {
  std::vector<int64_t> items;         ///< the items, bin after bin
  std::vector<int64_t> begins = {0};  ///< of each bin in `items`, and the end

  int64_t bins() const { return static_cast<int64_t>(begins.size()) - 1; }
  std::span<const int64_t> of_bin(int64_t bin) const;
};

/// Best-fit decreasing (Johnson et al., "Worst-Case Performance Bounds for Simple One-Dimensional
/// Packing Algorithms", 1974): the longest item first, each into the bin with the least room that
/// still fits it, or into a new one. `order` lists the items and breaks ties between equal lengths,
/// so that different orders give different packings with the same number of bins. Lengths must be 1
/// to `room` (UsageError). Needs no libtorch.
Packing pack_best_fit(std::span<const int64_t> lengths, std::span<const int64_t> order,
                      int64_t room);

}  // namespace lockstep
