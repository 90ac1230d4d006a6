#pragma once

// Internal.

#include <string>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/datasets/batch_sizes.h"

namespace lockstep {

/// What the user should know of the schedules that `config` sets, before a run with these batches
/// starts: a decay of the learning rate that ends before the training does, and a warm-up or decay
/// that takes another number of iterations than its field says, because batches change size.
std::vector<std::string> schedule_notes(const Config& config, const BatchSchedule& batches);

}  // namespace lockstep
