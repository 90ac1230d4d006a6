#include "lockstep/training/batch_sizes.h"

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {

BatchSizes batch_sizes(const TrainConfig& config, int64_t data_parallel_size) {
  const int64_t together =
      checked_mul(config.micro_batch_size, data_parallel_size, "train.micro_batch_size");
  const int64_t global = config.global_batch_size.value_or(together);
  require<ConfigError>(global % together == 0,
                       "train.global_batch_size: found {}, allowed: a multiple of {} "
                       "(train.micro_batch_size {} * {} data-parallel ranks)",
                       global, together, config.micro_batch_size, data_parallel_size);
  return {config.micro_batch_size, global, global / together};
}

}  // namespace lockstep
