#include "lockstep/parallel_state/pipeline_position.h"

#include "lockstep/core/check.h"

namespace lockstep {

PipelinePosition::PipelinePosition(const RankGrids& grids, int64_t rank)
    : pipelines_(grids.groups(GroupKind::pp)),
      chunks_(grids.sizes().virtual_pipeline),
      pipeline_(*pipelines_.index_of(rank)),
      stage_(*pipelines_.position_of(rank)) {}

void PipelinePosition::check_chunk(int64_t chunk) const {
  require<UsageError>(chunk >= 0 && chunk < chunks_.value_or(1),
                      "model chunk {} of a pipeline rank with {}: no such chunk", chunk,
                      chunks_.value_or(1));
}

bool PipelinePosition::is_first_stage(int64_t chunk) const {
  check_chunk(chunk);
  return chunk == 0 && is_first_stage();
}

bool PipelinePosition::is_last_stage(int64_t chunk) const {
  check_chunk(chunk);
  return chunk + 1 == chunks_.value_or(1) && is_last_stage();
}

bool PipelinePosition::in_embedding_group(int64_t chunk) const {
  return is_first_stage() ? is_first_stage(chunk) : is_last_stage(chunk);
}

}  // namespace lockstep
