#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/models/moe_layer.h"
#include "lockstep/models/recompute.h"
#include "lockstep/tests/support/operator_counts.h"
#include "lockstep/tests/support/rank_threads.h"

// The operators and collectives of a layer of experts.

namespace lockstep {
namespace {

at::Tensor tokens_of(double seed) {
  return at::sin(at::arange(96, at::kDouble) * 1.7 + seed).view({8, 2, 6}).clone();
}

LayerContext operators_context(const ParallelState& state) {
  TransformerConfig config;
  config.hidden_size = 6;
  config.ffn_hidden_size = 12;
  config.moe_ffn_hidden_size = 12;
  config.num_experts = 4;
  config.init_method_std = 0.5;
  LayerContext context{.config = config, .options = at::TensorOptions(at::kDouble), .name = "mlp."};
  context.state = state;
  return context;
}

// On CUDA, index_add and index_put add with atomics, in a different order in every run.
TEST(MoEOperators, NothingIsAddedUpByIndexNorSearchedByTheHost) {
  for (const bool capacity : {false, true}) {
    LayerContext context = operators_context(ParallelState::single_process());
    if (capacity) context.config.moe_expert_capacity_factor = 0.8;
    const MoELayer layer(context);
    const at::Tensor x = tokens_of(0.3).requires_grad_(true);
    const testing::OperatorCounts counts;
    layer.forward(x).square().sum().backward();
    for (const char* name : {"aten::index_add", "aten::index_add_", "aten::index_put_",
                             "aten::_index_put_impl_", "aten::nonzero"})
      EXPECT_EQ(counts.of(name), 0) << name;
    EXPECT_GT(counts.of("aten::searchsorted"), 0);
  }
}

TEST(MoEOperators, ARecomputedLayerExchangesNumbersOfTokensOnce) {
  testing::CollectiveLog log;
  std::vector<at::Tensor> grads(4);
  testing::run_ranks(2,
                     [&](const ParallelState& state) {
                       const MoELayer layer(operators_context(state));
                       for (const bool again : {false, true}) {
                         const at::Tensor x =
                             tokens_of(static_cast<double>(state.rank())).requires_grad_(true);
                         const auto run = [&](const std::vector<at::Tensor>& inputs) {
                           return layer.forward(layer.forward(inputs[0]));
                         };
                         (again ? recompute(run, {x}) : run({x})).square().sum().backward();
                         grads[static_cast<size_t>(state.rank() * 2 + (again ? 1 : 0))] = x.grad();
                       }
                     },
                     {.sizes = {.expert = 2}, .log = &log});
  EXPECT_TRUE(at::equal(grads[0], grads[1]));
  EXPECT_TRUE(at::equal(grads[2], grads[3]));
  for (int64_t rank = 0; rank < 2; ++rank) {
    std::map<std::string, int> calls;
    for (const CollectiveRecord& call : log.of_rank(rank))
      if (call.group == "tp-ep") ++calls[call.operation + " of " + call.label];
    EXPECT_EQ(calls["all_gather of numbers of tokens"], 2 + 2);
    EXPECT_EQ(calls["all_to_all of tokens of the experts"], 2 + 4);
    EXPECT_EQ(calls["all_to_all of gradient of tokens of the experts"], 2 + 2);
  }
}

}  // namespace
}  // namespace lockstep
