#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/parallel_state/job_start.h"

/// On which numbers of ranks a run with train.elastic = dp can continue.
namespace lockstep {

/// The numbers of ranks up to `most` on which check_layout() finds nothing, the largest first.
std::vector<int64_t> fitting_world_sizes(const Config& config, int64_t most);

/// The fields that decide this: "parallel.tensor_model_parallel_size = 2, train.micro_batch_size =
/// 2, train.global_batch_size = 8". One line.
std::string limits_of_world_size(const Config& config);

/// If train.global_batch_size is unset, sets it to that of the checkpoint from which the run
/// resumes (see RunCheckpoints::load()), if that can be read; without a checkpoint, to what
/// `world_size` ranks take. So the batch size stays the same when the number of ranks changes.
void keep_global_batch(Config& config, int64_t world_size, const std::string& folder,
                       const JobStart& start);

}  // namespace lockstep
