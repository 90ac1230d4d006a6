#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/pipeline/schedule.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/planner/buffer_plan.h"
#include "lockstep/planner/link_plan.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/planner/time_plan.h"

/// Everything that is computed about a job before it starts, in one report. Needs no libtorch.
namespace lockstep {

/// The buffers of one model chunk on one rank of a pipeline stage.
struct ChunkBuffers {
  int64_t stage = 0;
  int64_t chunk = 0;  ///< number within the stage
  ModelChunk model;
  std::vector<PlannedBuffer> buffers;
};

struct JobReport {
  std::string job;  ///< what was planned, for a heading
  int64_t world_size = 0;
  int64_t num_parameters = 0;  ///< of the model, whatever the layout
  double flops_of_step = 0;    ///< of the model, of all ranks; see model_flops_per_token()
  RankGrids grids;
  std::vector<ChunkBuffers> buffers;
  ScheduleOptions schedule_options;
  PipelineSchedule schedule;
  Timeline timeline;  ///< with reference_cost()
  MemoryPlan memory;
  LinkPlan links;
  std::optional<TimePlan> time = {};  ///< on a machine, if one was named
};

/// The report for `config`, which is resolved, on as many ranks as `program` has; `program` is what
/// record_job() returns for the same configuration. ConfigError and UsageError as for
/// plan_memory(), plan_links() and schedule_options().
JobReport make_job_report(const std::string& job, const Config& config, const JobProgram& program,
                          int64_t ranks_per_host);

/// One JSON document, with a newline: job, world_size, ranks_per_host, hosts, parameters,
/// flops_of_step; groups (count and size of each kind); buffers (stage, chunk, group, ranks: how
/// many it has, with several optimizer instances those of one; parameters, numel, buckets as pairs
/// of start and end); schedule (family, pipeline, virtual_pipeline, microbatches, bubble_fraction,
/// warmup, alive); memory (stages, as in plan_memory()); links (group, ranks, operations,
/// inside_bytes, between_bytes, most_of_a_rank) and their sums; with a machine, also time (machine,
/// and what `plan time` writes).
void write_json(std::ostream& out, const JobReport& report);

/// The same for people.
void write_text(std::ostream& out, const JobReport& report);

/// The same as one self-contained HTML page: tables, and inline SVG drawings of buckets, the
/// schedule's timeline, memory, bytes and the step's time. A timeline of more than 20,000 tasks is
/// left out.
void write_page(std::ostream& out, const JobReport& report);

}  // namespace lockstep
