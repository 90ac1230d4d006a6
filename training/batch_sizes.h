#pragma once

#include <cstdint>

#include "lockstep/core/config.h"

namespace lockstep {

/// Global batch size and number of micro-batches of one rank.
struct BatchSizes {
  int64_t micro = 0;   ///< sequences
  int64_t global = 0;  ///< sequences
  int64_t num_microbatches = 0;
};

/// ConfigError naming train.global_batch_size if it does not divide.
BatchSizes batch_sizes(const TrainConfig& config, int64_t data_parallel_size);

}  // namespace lockstep
