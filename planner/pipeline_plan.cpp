#include "lockstep/planner/pipeline_plan.h"

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/counted.h"

namespace lockstep {
namespace {

int64_t chunks_of(const ParallelConfig& parallel) {
  return parallel.virtual_pipeline_model_parallel_size.value_or(1);
}

ScheduleFamily family_of(PipelineScheduleFamily family) {
  switch (family) {
    case PipelineScheduleFamily::gpipe:
      return ScheduleFamily::gpipe;
    case PipelineScheduleFamily::zb_h1:
      return ScheduleFamily::zb_h1;
    default:
      return ScheduleFamily::one_f_one_b;
  }
}

StageLayout cut(const Config& config) {
  const ParallelConfig& parallel = config.parallel;
  const int64_t stages = parallel.pipeline_model_parallel_size, chunks = chunks_of(parallel);
  if (!parallel.pipeline_model_parallel_layout)
    return split_layers(
        {.num_layers = config.model.num_layers,
         .pipeline = stages,
         .virtual_pipeline = chunks,
         .num_layers_in_first_pipeline_stage = parallel.num_layers_in_first_pipeline_stage,
         .num_layers_in_last_pipeline_stage = parallel.num_layers_in_last_pipeline_stage,
         .account_for_embedding_in_pipeline_split =
             parallel.account_for_embedding_in_pipeline_split,
         .account_for_loss_in_pipeline_split = parallel.account_for_loss_in_pipeline_split});
  require<ConfigError>(!parallel.num_layers_in_first_pipeline_stage &&
                           !parallel.num_layers_in_last_pipeline_stage &&
                           !parallel.account_for_embedding_in_pipeline_split &&
                           !parallel.account_for_loss_in_pipeline_split,
                       "found beside "
                       "num_layers_in_first_pipeline_stage, num_layers_in_last_pipeline_stage or "
                       "an account_for field, allowed: alone");
  StageLayout layout = parse_stage_layout(*parallel.pipeline_model_parallel_layout, stages);
  require<ConfigError>(layout.chunks() == chunks,
                       "pipeline layout '{}': found {}, allowed: pipeline_model_parallel_size "
                       "({}) x virtual_pipeline_model_parallel_size ({})",
                       layout.to_string(), counted(layout.chunks() * stages, "stage"), stages,
                       chunks);
  layout.validate(config.model.num_layers);
  return layout;
}

void check_ends(const StageLayout& layout) {
  const int64_t last = layout.pipeline() - 1;
  require<ConfigError>(layout.has_embedding(0, 0) && layout.has_loss(last, layout.chunks() - 1),
                       "pipeline layout '{}': allowed: the embedding (E) on the first stage, the "
                       "loss (L) on the last",
                       layout.to_string());
  for (int64_t rank = 0; rank <= last; ++rank) {
    bool holds = false;
    for (int64_t chunk = 0; chunk < layout.chunks(); ++chunk)
      holds = holds || !layout.stage(rank, chunk).empty();
    require<ConfigError>(holds, "pipeline layout '{}': pipeline rank {} holds nothing",
                         layout.to_string(), rank);
  }
}

}  // namespace

StageLayout stage_layout(const Config& config) {
  try {
    StageLayout layout = cut(config);
    check_ends(layout);
    return layout;
  } catch (const ConfigError& error) {
    if (config.parallel.pipeline_model_parallel_layout)
      fail<ConfigError>("parallel.pipeline_model_parallel_layout: {}", error.what());
    fail<ConfigError>("model.num_layers ({}) on parallel.pipeline_model_parallel_size ({}): {}",
                      config.model.num_layers, config.parallel.pipeline_model_parallel_size,
                      error.what());
  }
}

ScheduleOptions schedule_options(const Config& config, int64_t num_microbatches,
                                 bool forward_only) {
  const ParallelConfig& parallel = config.parallel;
  const ScheduleOptions options = {
      .pipeline = parallel.pipeline_model_parallel_size,
      .virtual_pipeline = chunks_of(parallel),
      .microbatches = num_microbatches,
      .microbatch_group_size = parallel.microbatch_group_size_per_vp_stage,
      .family = family_of(parallel.pipeline_schedule),
      .forward_only = forward_only};
  try {
    options.validate();
  } catch (const ConfigError& error) {
    fail<ConfigError>(
        "parallel.pipeline_schedule ({}) with pipeline_model_parallel_size ({}), "
        "virtual_pipeline_model_parallel_size ({}), microbatch_group_size_per_vp_stage ({}) and "
        "{} micro-batches of a data-parallel rank (see train.global_batch_size): {}",
        to_string(options.family), options.pipeline, options.virtual_pipeline, options.group_size(),
        num_microbatches, error.what());
  }
  return options;
}

}  // namespace lockstep
