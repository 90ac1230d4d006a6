#include "lockstep/models/random_seeds.h"

#include <algorithm>

namespace lockstep {
namespace {

uint64_t index_in(const ParallelState& state, GroupKind kind) {
  const RankList ranks = state.grids().group_of(kind, state.rank());
  return static_cast<uint64_t>(std::find(ranks.begin(), ranks.end(), state.rank()) - ranks.begin());
}

}  // namespace

RandomSeeds random_seeds(uint64_t seed, const ParallelState& state) {
  seed += 100 * index_in(state, GroupKind::pp);
  return {.replicated = seed,
          .tensor_parallel = seed + 2718 + index_in(state, GroupKind::tp),
          .expert_parallel = seed + 1024 + 100 * index_in(state, GroupKind::ep) +
                             index_in(state, GroupKind::expert_tp)};
}

}  // namespace lockstep
