#pragma once

#include <cstdint>

#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Seeds of the random generators of a rank, for a user's own layers that draw from an
/// at::Generator; the numbers are Megatron Core's. (Lockstep's own layers draw from counters: see
/// Dropout and fill_normal.)
struct RandomSeeds {
  uint64_t replicated;       ///< outside the tensor-parallel regions: equal on all ranks of tp
  uint64_t tensor_parallel;  ///< inside them: different on each rank of tp
  uint64_t expert_parallel;  ///< inside experts: different on each rank of ep and of etp
};

/// With s = `seed` + 100 * stage: s, s + 2718 + rank in tp, s + 1024 + 100 * rank in ep + rank in
/// etp. Ranks that differ only in dp or cp have the same seeds.
RandomSeeds random_seeds(uint64_t seed, const ParallelState& state);

}  // namespace lockstep
