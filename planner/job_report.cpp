#include "lockstep/planner/job_report.h"

#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>

#include "lockstep/core/check.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/parallel_state/group_listing.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/planner/model_flops.h"
#include "lockstep/planner/pipeline_plan.h"

namespace lockstep {
namespace {

using nlohmann::ordered_json;

std::vector<ChunkBuffers> buffers_of(const Config& config, const RankGrids& grids) {
  std::vector<ChunkBuffers> all;
  for (int64_t stage = 0; stage < config.parallel.pipeline_model_parallel_size; ++stage) {
    const std::vector<ModelChunk> chunks = chunks_of_stage(config, stage);
    for (size_t c = 0; c < chunks.size(); ++c) {
      const auto index = static_cast<int64_t>(c);
      all.push_back(
          {stage, index, chunks[c], chunk_buffers(config, grids, chunks[c], stage, index)});
    }
  }
  return all;
}

ordered_json groups_json(const RankGrids& grids) {
  std::ostringstream text;
  write_groups_json(text, grids, {.summary = true});
  return ordered_json::parse(text.view()).at("groups");
}

ordered_json buffers_json(const std::vector<ChunkBuffers>& chunks) {
  ordered_json list = ordered_json::array();
  for (const ChunkBuffers& chunk : chunks)
    for (const PlannedBuffer& buffer : chunk.buffers) {
      ordered_json buckets = ordered_json::array();
      for (const ParamLayout::Bucket& bucket : buffer.layout.buckets)
        buckets.push_back({bucket.start, bucket.end});
      list.push_back({{"stage", chunk.stage},
                      {"chunk", chunk.chunk},
                      {"group", to_string(buffer.group)},
                      {"ranks", buffer.options.data_parallel_size},
                      {"parameters", buffer.parameters},
                      {"numel", buffer.layout.numel},
                      {"buckets", std::move(buckets)}});
    }
  return list;
}

ordered_json schedule_json(const JobReport& report) {
  const ScheduleOptions& options = report.schedule_options;
  return {{"family", to_string(options.family)},
          {"pipeline", options.pipeline},
          {"virtual_pipeline", options.virtual_pipeline},
          {"microbatches", options.microbatches},
          {"bubble_fraction", report.timeline.bubble_fraction()},
          {"warmup", report.schedule.warmup},
          {"alive", peak_live_microbatches(report.schedule)}};
}

ordered_json memory_json(const MemoryPlan& plan) {
  std::ostringstream text;
  write_json(text, plan);
  return ordered_json::parse(text.view()).at("stages");
}

ordered_json links_json(const LinkPlan& plan) {
  ordered_json groups = ordered_json::array();
  for (const LinkUse& use : plan.groups)
    groups.push_back({{"group", use.group},
                      {"ranks", use.ranks},
                      {"operations", use.operations},
                      {"inside_bytes", use.inside_bytes},
                      {"between_bytes", use.between_bytes},
                      {"most_of_a_rank", use.most_of_a_rank}});
  return {{"inside_bytes", plan.inside_bytes()},
          {"between_bytes", plan.between_bytes()},
          {"groups", std::move(groups)}};
}

MemoryPlan recorded_memory(const Config& config, const JobProgram& program) {
  MemoryPlan plan = plan_memory(config, program.world_size());
  const std::vector<int64_t> peaks = recorded_peaks(program);
  for (size_t stage = 0; stage < peaks.size(); ++stage)
    plan.stages.at(stage).recorded_peak_bytes = peaks[stage];
  return plan;
}

ordered_json time_json(const TimePlan& time) {
  std::ostringstream text;
  write_json(text, time);
  ordered_json json = {{"machine", time.machine}};
  json.update(ordered_json::parse(text.view()));
  return json;
}

double mib(int64_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

void write_buffers_text(std::ostream& out, const std::vector<ChunkBuffers>& chunks) {
  out << fmt::format("{:>5}  {:>5}  {:<15}  {:>6}  {:>15}  {:>15}  {:>7}\n", "stage", "chunk",
                     "reduced over", "ranks", "parameters", "elements", "buckets");
  for (const ChunkBuffers& chunk : chunks)
    for (const PlannedBuffer& buffer : chunk.buffers)
      out << fmt::format("{:>5}  {:>5}  {:<15}  {:>6}  {:>15}  {:>15}  {:>7}\n", chunk.stage,
                         chunk.chunk, to_string(buffer.group), buffer.options.data_parallel_size,
                         buffer.parameters, buffer.layout.numel, buffer.layout.buckets.size());
}

void write_links_text(std::ostream& out, const LinkPlan& plan) {
  out << fmt::format(
      "sent in a step, {} ranks a host, MiB\n{:<20}  {:>7}  {:>11}  {:>15}  {:>15}  "
      "{:>15}\n",
      plan.ranks_per_host, "group", "ranks", "operations", "inside hosts", "between hosts",
      "most of a rank");
  for (const LinkUse& use : plan.groups)
    out << fmt::format("{:<20}  {:>7}  {:>11}  {:>15.2f}  {:>15.2f}  {:>15.2f}\n", use.group,
                       use.ranks, use.operations, mib(use.inside_bytes), mib(use.between_bytes),
                       mib(use.most_of_a_rank));
}

}  // namespace

JobReport make_job_report(const std::string& job, const Config& config, const JobProgram& program,
                          int64_t ranks_per_host) {
  const int64_t world = program.world_size();
  const RankGrids grids = config_grids(config.parallel, world);
  const BatchSizes sizes = batch_sizes(config.train, grids.data_parallel_size());
  const ScheduleOptions options = schedule_options(config, sizes.num_microbatches);
  PipelineSchedule schedule = make_schedule(options);
  Timeline timeline = simulate(schedule, reference_cost(schedule));
  const double tokens =
      static_cast<double>(sizes.global) * static_cast<double>(config.model.seq_length);
  return {.job = job,
          .world_size = world,
          .num_parameters = num_parameters(config),
          .flops_of_step = tokens * model_flops_per_token(config),
          .grids = grids,
          .buffers = buffers_of(config, grids),
          .schedule_options = options,
          .schedule = std::move(schedule),
          .timeline = std::move(timeline),
          .memory = recorded_memory(config, program),
          .links = plan_links(program, ranks_per_host)};
}

void write_json(std::ostream& out, const JobReport& report) {
  ordered_json json = {{"job", report.job},
                       {"world_size", report.world_size},
                       {"ranks_per_host", report.links.ranks_per_host},
                       {"hosts", report.links.hosts},
                       {"parameters", report.num_parameters},
                       {"flops_of_step", report.flops_of_step},
                       {"groups", groups_json(report.grids)},
                       {"buffers", buffers_json(report.buffers)},
                       {"schedule", schedule_json(report)},
                       {"memory", memory_json(report.memory)},
                       {"links", links_json(report.links)}};
  if (report.time) json["time"] = time_json(*report.time);
  // Paths and names are any bytes.
  out << json.dump(-1, ' ', false, ordered_json::error_handler_t::replace) << "\n";
}

void write_text(std::ostream& out, const JobReport& report) {
  const ScheduleOptions& options = report.schedule_options;
  out << fmt::format("{}: {} parameters, {} micro-batches, {:.4g} TFLOP a step\n\n", report.job,
                     report.num_parameters, options.microbatches, report.flops_of_step / 1e12);
  write_groups_text(out, report.grids, {.summary = true});
  out << "\n";
  write_buffers_text(out, report.buffers);
  out << fmt::format("\nschedule {}: pipeline {} x {}, {} micro-batches, bubble {:.2f} %\n\n",
                     to_string(options.family), options.pipeline, options.virtual_pipeline,
                     options.microbatches, 100 * report.timeline.bubble_fraction());
  write_text(out, report.memory);
  out << "\n";
  write_links_text(out, report.links);
  if (!report.time) return;
  out << "\n";
  write_text(out, *report.time);
}

}  // namespace lockstep
