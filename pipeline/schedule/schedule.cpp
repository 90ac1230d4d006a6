#include "lockstep/pipeline/schedule.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

using Tasks = std::vector<PipelineTask>;

constexpr int64_t kMaxTasks = int64_t{1} << 22;

void check_positive(const char* name, int64_t size) {
  require<ConfigError>(size >= 1, "{}: found {}, allowed: >= 1", name, size);
}

/// Checks the conditions of the interleaved schedule.
void check_interleaving(const ScheduleOptions& options) {
  const int64_t stages = options.pipeline, microbatches = options.microbatches;
  const int64_t group = options.group_size(), chunks = options.virtual_pipeline;
  require<ConfigError>(options.family == ScheduleFamily::one_f_one_b,
                       "virtual: found {}, allowed with schedule {}: 1", chunks,
                       to_string(options.family));
  require<ConfigError>(stages > 1, "virtual: found {}, allowed with pipeline (1): 1", chunks);
  require<ConfigError>(microbatches >= stages,
                       "microbatches: found {}, allowed with virtual ({}) > 1: at least pipeline "
                       "({}), the smallest microbatch-group-size",
                       microbatches, chunks, stages);
  require<ConfigError>(group >= stages && group <= microbatches,
                       "microbatch-group-size: found {}, allowed with virtual ({}) > 1: pipeline "
                       "({}) to microbatches ({})",
                       group, chunks, stages, microbatches);
  const int64_t last_group = microbatches % group;
  require<ConfigError>(last_group == 0 || last_group >= stages,
                       "microbatch-group-size: found {}, which leaves {} of microbatches ({}) for "
                       "the last group, allowed: none or at least pipeline ({})",
                       group, last_group, microbatches, stages);
}

/// Forwards and backwards of one rank of 1F1B, interleaved if there are several chunks.
Tasks one_f_one_b(const ScheduleOptions& options, int64_t warmup) {
  const auto table =
      schedule_table(options.microbatches, options.virtual_pipeline, options.group_size());
  const size_t ahead = static_cast<size_t>(warmup);
  Tasks tasks;
  for (size_t k = 0; k < table.size() + ahead; ++k) {
    if (k < table.size()) tasks.push_back({TaskKind::forward, table[k].first, table[k].second});
    if (k < ahead) continue;
    const auto [microbatch, chunk] = table[k - ahead];
    tasks.push_back({TaskKind::backward, microbatch, options.virtual_pipeline - 1 - chunk});
  }
  return tasks;
}

/// After each backward comes the weight part of the micro-batch `rank` before it; the last ones are
/// at the end of the list.
Tasks with_weight_parts(const Tasks& tasks, int64_t microbatches, int64_t rank) {
  Tasks result;
  for (const PipelineTask& task : tasks) {
    result.push_back(task);
    if (task.kind == TaskKind::backward && task.microbatch >= rank)
      result.push_back({TaskKind::weight, task.microbatch - rank, 0});
  }
  for (int64_t m = std::max<int64_t>(microbatches - rank, 0); m < microbatches; ++m)
    result.push_back({TaskKind::weight, m, 0});
  return result;
}

Tasks tasks_of_rank(const ScheduleOptions& options, int64_t rank, int64_t warmup) {
  Tasks tasks = one_f_one_b(options, warmup);
  if (options.forward_only)
    std::erase_if(tasks, [](const PipelineTask& t) { return t.kind != TaskKind::forward; });
  else if (options.family == ScheduleFamily::zb_h1)
    return with_weight_parts(tasks, options.microbatches, rank);
  return tasks;
}

int64_t warmup_of(const ScheduleOptions& options, int64_t rank) {
  const int64_t forwards = options.microbatches * options.virtual_pipeline;
  if (options.forward_only || options.family == ScheduleFamily::gpipe) return forwards;
  const int64_t later = options.pipeline - rank - 1;
  const int64_t chunks = options.virtual_pipeline;
  const int64_t ahead = chunks == 1 ? later : 2 * later + (chunks - 1) * options.group_size();
  return std::min(ahead, forwards);
}

}  // namespace

std::string to_string(const PipelineTask& task) {
  return fmt::format("{}{}.{}", "FBW"[static_cast<int>(task.kind)], task.microbatch, task.chunk);
}

const char* to_string(ScheduleFamily family) {
  switch (family) {
    case ScheduleFamily::gpipe:
      return "gpipe";
    case ScheduleFamily::zb_h1:
      return "zb-h1";
    default:
      return "1f1b";
  }
}

void ScheduleOptions::validate() const {
  check_positive("pipeline", pipeline);
  check_positive("virtual", virtual_pipeline);
  check_positive("microbatches", microbatches);
  check_positive("microbatch-group-size", group_size());
  if (virtual_pipeline > 1 && !forward_only) check_interleaving(*this);
  const auto product = [](int64_t a, int64_t b) {
    return a > kMaxTasks / b ? kMaxTasks + 1 : a * b;
  };
  const int64_t kinds = forward_only ? 1 : family == ScheduleFamily::zb_h1 ? 3 : 2;
  require<ConfigError>(
      product(product(product(pipeline, virtual_pipeline), microbatches), kinds) <= kMaxTasks,
      "pipeline ({}) x virtual ({}) x microbatches ({}) gives more than {} tasks, which is not "
      "supported",
      pipeline, virtual_pipeline, microbatches, kMaxTasks);
}

std::optional<PlacedTask> PipelineSchedule::producer_of(int64_t rank,
                                                        const PipelineTask& task) const {
  const int64_t last = pipeline() - 1;
  const auto [kind, microbatch, chunk] = task;
  if (kind == TaskKind::weight) return std::nullopt;
  if (kind == TaskKind::forward) {
    if (rank > 0) return PlacedTask{rank - 1, task};
    if (chunk == 0) return std::nullopt;
    return PlacedTask{last, {kind, microbatch, chunk - 1}};
  }
  if (rank < last) return PlacedTask{rank + 1, task};
  if (chunk + 1 == chunks) return PlacedTask{rank, {TaskKind::forward, microbatch, chunk}};
  return PlacedTask{0, {kind, microbatch, chunk + 1}};
}

std::optional<PlacedTask> PipelineSchedule::consumer_of(int64_t rank,
                                                        const PipelineTask& task) const {
  const int64_t last = pipeline() - 1;
  const auto [kind, microbatch, chunk] = task;
  if (kind == TaskKind::weight) return std::nullopt;
  if (kind == TaskKind::forward) {
    if (rank < last) return PlacedTask{rank + 1, task};
    if (chunk + 1 == chunks) return std::nullopt;
    return PlacedTask{0, {kind, microbatch, chunk + 1}};
  }
  if (rank > 0) return PlacedTask{rank - 1, task};
  if (chunk == 0) return std::nullopt;
  return PlacedTask{last, {kind, microbatch, chunk - 1}};
}

PipelineSchedule make_schedule(const ScheduleOptions& options) {
  options.validate();
  PipelineSchedule schedule;
  schedule.chunks = options.virtual_pipeline;
  schedule.microbatches = options.microbatches;
  schedule.forward_only = options.forward_only;
  schedule.split_backward = options.family == ScheduleFamily::zb_h1 && !options.forward_only;
  for (int64_t rank = 0; rank < options.pipeline; ++rank) {
    schedule.warmup.push_back(warmup_of(options, rank));
    schedule.ranks.push_back(tasks_of_rank(options, rank, schedule.warmup.back()));
  }
  return schedule;
}

int64_t num_warmup_microbatches(const ScheduleOptions& options, int64_t rank) {
  options.validate();
  require<UsageError>(rank >= 0 && rank < options.pipeline,
                      "rank {} of a pipeline of {}: no such rank", rank, options.pipeline);
  return warmup_of(options, rank);
}

std::vector<std::pair<int64_t, int64_t>> schedule_table(int64_t microbatches, int64_t chunks,
                                                        int64_t group_size) {
  require<UsageError>(microbatches >= 1 && chunks >= 1 && group_size >= 1,
                      "schedule table of {} micro-batches, {} chunks, groups of {}: allowed: >= 1",
                      microbatches, chunks, group_size);
  std::vector<std::pair<int64_t, int64_t>> table;
  table.reserve(static_cast<size_t>(microbatches * chunks));
  for (int64_t first = 0; first < microbatches;) {
    const int64_t end = first + std::min(group_size, microbatches - first);
    for (int64_t chunk = 0; chunk < chunks; ++chunk)
      for (int64_t m = first; m < end; ++m) table.emplace_back(m, chunk);
    first = end;
  }
  return table;
}

}  // namespace lockstep
