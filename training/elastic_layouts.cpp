#include "lockstep/training/elastic_layouts.h"

#include <optional>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/planner/config_grids.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

/// The global batch of the checkpoint from which the run would resume now.
std::optional<int64_t> saved_global_batch(const CheckpointConfig& config, const std::string& folder,
                                          const JobStart& start) {
  try {
    const std::string path = checkpoint_to_resume_from(config, folder, start);
    return path.empty() ? std::nullopt : CheckpointReader(path).config().train.global_batch_size;
  } catch (const FileError&) {
    return std::nullopt;  // loading it reports the error
  }
}

}  // namespace

std::vector<int64_t> fitting_world_sizes(const Config& config, int64_t most) {
  std::vector<int64_t> sizes;
  for (int64_t ranks = most; ranks >= 1; --ranks) try {
      check_layout(config, ranks);
      sizes.push_back(ranks);
    } catch (const ConfigError&) {
    }
  return sizes;
}

std::string limits_of_world_size(const Config& config) {
  std::string text;
  for (const ConfigValue& field : config_values(config)) {
    const bool of_model = field.path.starts_with("parallel.") &&
                          field.path.ends_with("_parallel_size") && field.value != "1" &&
                          field.value != "unset";
    const bool of_batch =
        field.path == "train.micro_batch_size" || field.path == "train.global_batch_size" ||
        field.path == "train.step_batch_size_schedule" || field.path == "train.rampup_batch_size";
    if (of_model || (of_batch && field.value != "unset"))
      text += fmt::format("{}{} = {}", text.empty() ? "" : ", ", field.path, field.value);
  }
  return text;
}

void keep_global_batch(Config& config, int64_t world_size, const std::string& folder,
                       const JobStart& start) {
  if (config.train.global_batch_size || config.train.step_batch_size_schedule) return;
  const auto saved = saved_global_batch(config.checkpoint, folder, start);
  const RankGrids grids = config_grids(config.parallel, world_size);
  config.train.global_batch_size =
      saved ? *saved : batch_sizes(config.train, grids.data_parallel_size()).global;
}

}  // namespace lockstep
