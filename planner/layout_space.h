#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/core/config.h"

/// The ways in which a job can be laid out over its ranks. Needs no libtorch.
namespace lockstep {

/// The fields that `lockstep plan best` chooses; sizes as in ParallelConfig.
struct JobLayout {
  /// If more than 1: with sequence parallelism unless the configuration has
  /// distribute_saved_activations, and with tp_comm_overlap as in the configuration.
  int64_t tensor = 1;
  int64_t context = 1;
  int64_t pipeline = 1;
  int64_t chunks = 1;  ///< of each pipeline rank
  int64_t expert = 1;
  int64_t expert_tensor = 1;
  int64_t instances = 1;  ///< of the distributed optimizer
  int64_t micro_batch_size = 1;
  RecomputeGranularity recompute = RecomputeGranularity::none;
  ShardingStrategy sharding = ShardingStrategy::no_shard;
  PipelineScheduleFamily schedule = PipelineScheduleFamily::_1f1b;
  std::optional<int64_t> bucket_size = {};  ///< elements

  bool operator==(const JobLayout&) const = default;
};

/// "parallel.tensor_model_parallel_size=2", ...: the arguments of `--set` that give `config` this
/// layout. Fields that have their default both in the layout and in `config` are left out.
std::vector<std::string> overrides_of(const JobLayout& layout, const Config& config);

/// `config`, which is resolved, with the layout's fields, resolved again. ConfigError as for
/// resolve().
Config with_layout(Config config, const JobLayout& layout);

/// Paths of the fields that layouts set.
const std::vector<std::string>& layout_fields();

struct LayoutSpace {
  int64_t world_size = 1;
  /// The fields of layout_fields() that stay as the configuration has them.
  std::vector<std::string> kept = {};
};

/// Calls `visit` with each legal layout of `config` on the ranks: sizes that divide the ranks, all
/// batches of the run and what they cut, as validate(), config_grids(), BatchSchedule,
/// stage_layout() and schedule_options() require. Micro-batches are powers of two, up to 16; with
/// several chunks a rank has up to 8 of them; an expert is cut over as many ranks as other layers
/// are, or a divisor of that; the optimizer has any number of instances that leaves several shards;
/// the schedule is 1F1B, or the configuration's if it is kept, and buckets are the configuration's.
/// Layouts that differ only in the last fields of JobLayout follow each other.
/// Returns how many combinations of sizes were examined.
/// ConfigError: a kept field that is not one of layout_fields(), a `world_size` below 1, no
/// train.global_batch_size, or a train.step_batch_size_schedule.
int64_t visit_layouts(const Config& config, const LayoutSpace& space,
                      const std::function<void(const JobLayout&)>& visit);

}  // namespace lockstep
