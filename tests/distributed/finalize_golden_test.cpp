#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using enum MeshAxis;

/// In the order of scripts/golden/finalize.py, with the meaning of Megatron's attributes.
const std::vector<std::pair<std::string, ParamDescription>> kParams = {
    {"embedding", {.tie = Tie{"word_embeddings"}}},
    {"norm", {.gradient_states = {{tp, GradientState::partial_sum}}}},
    {"q_layernorm", {.gradient_states = {{tp, GradientState::partial_sum}}}},
    {"router", {.gradient_states = {{tp, GradientState::partial_mean}}}},
    {"embedder", {.tie = Tie{"embedder", TiedStages::all}}},
    {"matrix", {}},
};

at::Tensor gradient(size_t param, int64_t chunk, int64_t rank) {
  const int64_t offset = 13 * rank + 29 * static_cast<int64_t>(param) + 41 * chunk;
  return at::arange(5, at::kLong).mul(7).add(offset).remainder(101).to(at::kDouble) / 16 - 3;
}

TEST(FinalizeModelGrads, EqualsMegatronCoreOnEightRanks) {
  std::ifstream file(LOCKSTEP_SOURCE_DIR "/tests/distributed/finalize_golden.json");
  const auto golden = nlohmann::json::parse(file);
  testing::run_ranks(
      8,
      [&](const ParallelState& state) {
        const int64_t rank = state.rank(), stage = rank / 4;
        DescribedParams chunks[2];
        std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
        for (int64_t c = 0; c < 2; ++c) {
          for (const auto& [name, description] : kParams)
            if (name != "embedding" || c == stage) chunks[c].add(name, {5}, description);
          ddps.push_back(std::make_unique<DistributedDataParallel>(chunks[c], state));
          chunks[c].backward([&](const std::string& name, auto&) {
            const auto found = std::find_if(kParams.begin(), kParams.end(),
                                            [&](const auto& param) { return param.first == name; });
            return gradient(static_cast<size_t>(found - kParams.begin()), c, rank);
          });
        }
        const double tokens = stage == 1 ? 3. + static_cast<double>(rank) : 0;
        finalize_model_grads({ddps[0].get(), ddps[1].get()}, at::full({}, tokens, at::kDouble));
        for (size_t c = 0; c < 2; ++c) {
          const auto& expected = golden[static_cast<size_t>(rank)][c];
          ASSERT_EQ(expected.size(), chunks[c].params().size());
          for (const auto& [name, param] : chunks[c].params()) {
            const at::Tensor theirs =
                at::tensor(expected[name].get<std::vector<double>>(), at::kDouble);
            EXPECT_TRUE(at::allclose(param.grad(), theirs, 1e-15, 0))
                << name << " of chunk " << c << " on rank " << rank;
          }
        }
      },
      {.sizes = {.tensor = 2, .pipeline = 2, .virtual_pipeline = 2}});
}

}  // namespace
}  // namespace lockstep
