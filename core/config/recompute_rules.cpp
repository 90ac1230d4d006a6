#include "lockstep/core/recompute_rules.h"

#include <algorithm>

namespace lockstep {

std::vector<int64_t> recomputed_pieces(const TransformerConfig& model, int64_t num_layers) {
  if (model.recompute_granularity != RecomputeGranularity::full) return {};
  const int64_t count = *model.recompute_num_layers;
  std::vector<int64_t> pieces;
  if (model.recompute_method == RecomputeMethod::block)
    pieces.assign(static_cast<size_t>(std::min(count, num_layers)), 1);
  else
    for (int64_t first = 0; first < num_layers; first += pieces.back())
      pieces.push_back(std::min(count, num_layers - first));
  return pieces;
}

}  // namespace lockstep
