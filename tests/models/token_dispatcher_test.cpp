#include "lockstep/models/token_dispatcher.h"

#include <gtest/gtest.h>

#include <random>

#include <ATen/ATen.h>

#include "lockstep/models/routing.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

// Tokens on their way to experts on several ranks and back.

namespace lockstep {
namespace {

using testing::run_ranks;

/// [tokens, 3]
at::Tensor tokens_of_rank(int64_t rank, int64_t tokens) {
  return at::sin(at::arange(tokens * 3, at::kDouble) * 1.7 + rank).view({tokens, 3}) * 2;
}

/// Random choices. Experts may be empty or hot.
Routing random_routing(int64_t tokens, int64_t experts, std::mt19937_64& engine) {
  std::uniform_int_distribution<int> mood(0, 3);
  std::uniform_real_distribution<double> uniform;
  const int kind = mood(engine);
  const double density = uniform(engine);
  const auto hot = static_cast<int64_t>(engine() % static_cast<uint64_t>(experts));
  Routing routing{at::zeros({tokens, experts}, at::kDouble),
                  at::zeros({tokens, experts}, at::kBool)};
  for (int64_t t = 0; t < tokens; ++t)
    for (int64_t e = 0; e < experts; ++e) {
      const bool chosen = kind == 0   ? e == hot
                          : kind == 1 ? e != hot && uniform(engine) < density
                                      : uniform(engine) < density;
      routing.map.mutable_data_ptr<bool>()[t * experts + e] = chosen;
      routing.probs.mutable_data_ptr<double>()[t * experts + e] = chosen ? uniform(engine) : 0;
    }
  return routing;
}

/// 50 routings on a layout: every token reaches each of its experts once, and returns.
void expect_tokens_conserved(ParallelSizes sizes, int64_t world, TokenDispatcher type,
                             uint64_t seed) {
  const int64_t experts = 4;
  run_ranks(world,
            [&](const ParallelState& state) {
              const auto dispatcher = make_token_dispatcher(type, state, experts);
              const ProcessGroup ep = state.group(GroupKind::ep);
              const ProcessGroup etp = state.group(GroupKind::expert_tp);
              std::mt19937_64 engine(seed * 100 + static_cast<uint64_t>(state.rank()));
              const int64_t tokens = 5;
              const at::Tensor sums = at::zeros({2, 50}, at::kLong);  // arrived, chosen
              for (int64_t round = 0; round < 50; ++round) {
                const Routing routing = random_routing(tokens, experts, engine);
                const at::Tensor x = tokens_of_rank(state.rank(), tokens);
                int64_t arrived = 0;
                const auto run = [&](const at::Tensor& rows, const RowGroupsPtr& groups) {
                  const std::vector<int64_t>& counts = groups->rows_on_host();
                  std::vector<at::Tensor> factors;
                  for (size_t e = 0; e < counts.size(); ++e) {
                    arrived += counts[e];
                    const auto expert = ep.rank() * experts / ep.size() + static_cast<int64_t>(e);
                    factors.push_back(at::full({counts[e], 1}, expert + 1, at::kDouble));
                  }
                  return rows * at::cat(factors) / etp.size();
                };
                const at::Tensor output = dispatcher->run(x, routing, run, [] {});
                const at::Tensor factor =
                    (routing.probs * at::arange(1, experts + 1)).sum(1, /*keepdim=*/true);
                EXPECT_TRUE(at::allclose(output, x * factor, 1e-12, 1e-12));
                sums[0][round].fill_(arrived);
                sums[1][round].copy_(routing.map.sum());
              }
              all_reduce(state.world(), sums, ReduceOp::sum, "rows").wait();
              EXPECT_TRUE(at::equal(sums[0], sums[1] * etp.size()));
            },
            {.sizes = std::move(sizes)});
}

TEST(TokenDispatcher, ConservesTokensOverRandomRoutings) {
  uint64_t seed = 0;  // 20 times 50 routings
  for (const auto type : {TokenDispatcher::alltoall, TokenDispatcher::allgather})
    for (const auto& [world, sizes] : std::vector<std::pair<int64_t, ParallelSizes>>{
             {1, {}},
             {2, {.expert = 2}},
             {4, {.expert = 4}},
             {4, {.tensor = 2, .expert = 4, .expert_tensor = 1}},
             {4, {.tensor = 2, .expert = 2}},
             {3, {.expert = 1, .expert_tensor = 3}},
             {4, {.expert = 2, .expert_tensor = 2}},
             {8, {.tensor = 2, .context = 2, .expert = 2, .expert_tensor = 2}},
             {6, {.tensor = 3, .expert = 2, .expert_tensor = 1}},
             {8, {.tensor = 2, .expert = 4, .expert_tensor = 2}}})
      expect_tokens_conserved(sizes, world, type, ++seed);
}

}  // namespace
}  // namespace lockstep
