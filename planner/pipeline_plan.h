#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/pipeline/schedule.h"
#include "lockstep/pipeline/stage_layout.h"

/// The pipeline that a configuration asks for. Needs no libtorch.
namespace lockstep {

/// Which layers stand on which chunk of which pipeline rank: by
/// parallel.pipeline_model_parallel_layout, else as split_layers() cuts. ConfigError naming the
/// fields: what those refuse; a layout beside the fields that cut without one, or with another
/// number of virtual stages than pipeline_model_parallel_size x
/// virtual_pipeline_model_parallel_size; an embedding that is not on the first virtual stage, a
/// loss that is not on the last, a rank that holds nothing.
StageLayout stage_layout(const Config& config);

/// The schedule of an iteration with `num_microbatches` micro-batches, or of as many in a
/// validation. ConfigError naming the fields: micro-batches that the schedule cannot take.
ScheduleOptions schedule_options(const Config& config, int64_t num_microbatches,
                                 bool forward_only = false);

}  // namespace lockstep
