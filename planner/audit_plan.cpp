#include "lockstep/planner/audit_plan.h"

#include <map>

#include "lockstep/core/check.h"
#include "lockstep/distributed/buffer_kind.h"
#include "lockstep/optimizer/expected_audit.h"
#include "lockstep/parallel_state/pipeline_position.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/stage_shapes.h"

namespace lockstep {
namespace {

/// The chunks of a pipeline stage: all its ranks hold pieces of the same shapes.
std::vector<DescribedChunk> described_stage(const Config& config, int64_t stage) {
  std::vector<DescribedChunk> described;
  int64_t number = 0;
  for (const ModelChunk& chunk : chunks_of_stage(config, stage)) {
    DescribedChunk one = {.bucketed = has_buckets(stage, number++)};
    for (ShapedParameter& param : chunk_parameters(config, chunk)) {
      DescribedParameter& parameter = one.parameters.emplace_back();
      parameter.name = std::move(param.name);
      parameter.shape = std::move(param.shape);
      parameter.description = std::move(param.description);
      parameter.trained = param.trained;
      parameter.unit = param.unit;
      set_update_numbers(parameter, config.optimizer);
    }
    if (!one.parameters.empty()) described.push_back(std::move(one));
  }
  return described;
}

}  // namespace

AuditReport plan_audit(const Config& config, std::optional<int64_t> world_size,
                       const std::vector<int64_t>& ranks) {
  const RankGrids grids =
      config_grids(config.parallel, world_size ? *world_size : fewest_ranks(config.parallel));
  for (const int64_t rank : ranks)
    require<UsageError>(rank >= 0 && rank < grids.sizes().world_size,
                        "rank: found {}, allowed: 0 to {}", rank, grids.sizes().world_size - 1);
  std::map<int64_t, std::vector<DescribedChunk>> of_stages;
  const auto of_rank = [&](int64_t rank) {
    const int64_t stage = PipelinePosition(grids, rank).stage();
    const auto [found, is_new] = of_stages.try_emplace(stage);
    if (is_new) found->second = described_stage(config, stage);
    return found->second;
  };
  return expected_audit(of_rank, grids, {.ddp = config.ddp, .optimizer = config.optimizer}, ranks);
}

}  // namespace lockstep
