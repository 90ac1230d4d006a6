#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// Pipeline schedules as data: for each rank the list of tasks that it runs, in order. Nothing here
/// communicates or computes; communication_steps.h orders the transfers, simulation.h gives the
/// times.
///
/// A model is cut into P x V virtual stages, P pipeline ranks with V model chunks each; chunk c of
/// rank r is virtual stage c x P + r. "Rank" means the rank in the pipeline group.
namespace lockstep {

enum class TaskKind {
  forward,   ///< forward of one micro-batch through one chunk
  backward,  ///< its backward; if backward is split, only the gradient of the input
  weight,    ///< if backward is split, the gradient of the weights
};

/// One piece of work of one rank.
struct PipelineTask {
  TaskKind kind = TaskKind::forward;
  int64_t microbatch = 0;
  int64_t chunk = 0;  ///< model chunk of the rank
  bool operator==(const PipelineTask&) const = default;
};

/// "F3.0": the forward of micro-batch 3 through chunk 0; likewise "B3.0" and "W3.0".
std::string to_string(const PipelineTask& task);

/// A task and the rank that runs it.
struct PlacedTask {
  int64_t rank = 0;
  PipelineTask task;
  bool operator==(const PlacedTask&) const = default;
};

enum class ScheduleFamily {
  /// One forward, one backward (PipeDream-Flush, Megatron Core's default); with more than one chunk
  /// interleaved in groups of micro-batches as in Megatron Core; with one rank no pipeline: each
  /// micro-batch's backward follows its forward.
  one_f_one_b,
  /// All forwards, then all backwards, both in the order of the micro-batches.
  gpipe,
  /// Zero bubble, the variant ZB-H1 (Qi et al., "Zero Bubble Pipeline Parallelism", 2023): as 1F1B,
  /// with the weight part of backward postponed to where the rank would otherwise wait, within
  /// 1F1B's memory.
  zb_h1,
};

/// "1f1b", "gpipe", "zb-h1"
const char* to_string(ScheduleFamily family);

struct ScheduleOptions {
  int64_t pipeline = 1;          ///< P: ranks of the pipeline
  int64_t virtual_pipeline = 1;  ///< V: model chunks of each rank
  int64_t microbatches = 1;      ///< M: micro-batches of each data-parallel rank in one step
  /// N: micro-batches that a rank runs through one chunk before it turns to the next; unset: P. Has
  /// no effect with one chunk.
  std::optional<int64_t> microbatch_group_size = {};
  ScheduleFamily family = ScheduleFamily::one_f_one_b;
  bool forward_only = false;  ///< forwards alone, for validation

  int64_t group_size() const { return microbatch_group_size.value_or(pipeline); }

  /// ConfigError: a size below 1; with V > 1 also one rank, N outside P ... M, a last group (M mod
  /// N) that is not empty and smaller than P, a family other than 1F1B (all of which forward_only
  /// allows); more than 2^22 tasks.
  void validate() const;
};

/// The tasks of each rank. Made by make_schedule(), or by hand and then checked by
/// check_schedule().
struct PipelineSchedule {
  int64_t chunks = 1;
  int64_t microbatches = 1;
  bool split_backward = false;  ///< there are weight tasks
  bool forward_only = false;
  /// For each rank: forwards before the first pair of a forward and a backward.
  std::vector<int64_t> warmup = {};
  /// For each rank: its tasks in order.
  std::vector<std::vector<PipelineTask>> ranks = {};

  int64_t pipeline() const { return static_cast<int64_t>(ranks.size()); }

  /// The task, on any rank, whose output `task` of `rank` waits for; none for the forward of the
  /// first virtual stage and for weight tasks. For the backward of the last virtual stage it is the
  /// forward there. (The dependency of each backward on its own forward is left out.)
  std::optional<PlacedTask> producer_of(int64_t rank, const PipelineTask& task) const;

  /// The task on another virtual stage that waits for the output of `task` of `rank`: for a forward
  /// the next stage's forward, for a backward the previous stage's backward; none at the ends and
  /// for weight tasks.
  std::optional<PlacedTask> consumer_of(int64_t rank, const PipelineTask& task) const;
};

/// ConfigError: as ScheduleOptions::validate().
PipelineSchedule make_schedule(const ScheduleOptions& options);

/// Forwards of `rank` before its first pair of a forward and a backward, at most M x V. 1F1B and
/// ZB-H1: P - rank - 1; interleaved: 2 (P - rank - 1) + (V - 1) N; GPipe and forward only: M x V.
/// (Megatron Core's num_warmup_microbatches.) ConfigError: as validate(). UsageError: no such rank.
int64_t num_warmup_microbatches(const ScheduleOptions& options, int64_t rank);

/// The order in which forwards go through the chunks of a rank: pairs of micro-batch and chunk,
/// group by group, and within each group chunk by chunk. Backwards go in the same order, with the
/// chunks counted from the last. (Megatron Core's schedule table.) UsageError: a number below 1.
std::vector<std::pair<int64_t, int64_t>> schedule_table(int64_t microbatches, int64_t chunks,
                                                        int64_t group_size);

}  // namespace lockstep
