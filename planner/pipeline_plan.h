#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/pipeline/schedule.h"
#include "lockstep/pipeline/stage_layout.h"

/// The pipeline that a configuration asks for. Needs no libtorch.
namespace lockstep {

/// Which layers are in which chunk of which pipeline rank: according to
/// parallel.pipeline_model_parallel_layout, or otherwise as split_layers() cuts. ConfigError naming
/// the fields: what those two refuse; a layout together with the fields that cut without one; a
/// layout whose number of virtual stages is not pipeline_model_parallel_size x
/// virtual_pipeline_model_parallel_size; an embedding that is not on the first virtual stage, a
/// loss that is not on the last, a rank that holds nothing.
StageLayout stage_layout(const Config& config);

/// The schedule of an iteration with `num_microbatches` micro-batches, or of a validation with that
/// many. ConfigError naming the fields: a number of micro-batches that the schedule does not allow.
ScheduleOptions schedule_options(const Config& config, int64_t num_microbatches,
                                 bool forward_only = false);

}  // namespace lockstep
