#include "lockstep/testing/rank_layout.h"

#include "lockstep/core/check.h"

namespace lockstep::testing {

RankGrids RankLayout::grids() const {
  require<ConfigError>(sizes.virtual_pipeline.value_or(1) == 1,
                       "RankLayout: sizes.virtual_pipeline: found {}, allowed: unset or 1, because "
                       "the checks make one model chunk per rank",
                       sizes.virtual_pipeline.value_or(1));
  ParallelSizes all = sizes;
  all.world_size = ranks;
  return RankGrids(all);
}

std::string to_string(const RankLayout& layout) {
  const RankGrids grids = layout.grids();
  std::string text = layout.ranks == 1 ? "1 rank" : fmt::format("{} ranks", layout.ranks);
  const auto add = [&](const char* axis, int64_t size) {
    if (size > 1) text += fmt::format(", {} {}", axis, size);
  };
  add("tp", layout.sizes.tensor);
  if (layout.sequence_parallel) text += ", sequence parallel";
  add("cp", layout.sizes.context);
  add("dp", grids.data_parallel_size());
  add("pp", layout.sizes.pipeline);
  add("ep", layout.sizes.expert);
  if (layout.sizes.expert > 1) add("etp", grids.expert_tensor_size());
  return text;
}

}  // namespace lockstep::testing
