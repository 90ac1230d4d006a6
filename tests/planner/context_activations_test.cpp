// What autograd keeps on the ranks of context parallelism, against the plan.

#include <gtest/gtest.h>

#include <chrono>
#include <thread>

#include <ATen/ATen.h>

#include "lockstep/models/context_parallel.h"
#include "lockstep/planner/activation_plan.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/tests/planner/planned_models.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/without_onednn.h"

namespace lockstep {
namespace {

using testing::latent;
using testing::small;
using testing::text_of;
using testing::with;

/// All transports on two ranks. Of the two hierarchies one exchanges heads in its first level and
/// has rings of one rank, the other one has a ring alone.
std::vector<std::vector<std::string>> transports() {
  const auto named = [](const char* name) { return std::string("parallel.cp_comm_type=") + name; };
  const std::string levels = "parallel.hierarchical_context_parallel_sizes=";
  return {{named("p2p")},
          {named("all_gather")},
          {named("a2a")},
          {named("a2a+p2p"), levels + "2,1"},
          {named("a2a+p2p"), levels + "1,2"},
          {"parallel.cp_comm_type_of_layers=a2a,all_gather,p2p"}};
}

const std::vector<std::vector<std::string>>& context_models() {
  static const std::string groups = "model.num_query_groups=2", bf16 = "train.precision=bf16",
                           learned = "model.position_embedding_type=learned_absolute",
                           none = "model.position_embedding_type=none";
  static const std::string selective = "model.recompute_granularity=selective";
  static const std::vector<std::vector<std::string>> models = {
      {},
      {groups},
      {groups, bf16},
      {learned},
      {groups, learned},
      {groups, none},
      {"model.qk_layernorm=true"},
      {"model.qk_layernorm=true", groups, learned, "model.normalization=LayerNorm"},
      {"model.window_size=9"},
      {"model.window_size=9", groups, learned},
      {"model.hidden_dropout=0.1", none},
      {"train.precision=fp64", "train.micro_batch_size=1"},
      {selective},
      {selective, groups, none},
      {"model.recompute_granularity=full"},
      latent({}),
      latent({bf16, "model.v_head_dim=16"}),
      latent({"model.window_size=9", "model.v_head_dim=30"}),
      latent({selective, "model.qk_layernorm=true"})};
  return models;
}

/// The bytes that stay allocated. The threads of collectives may hold what they sent for a moment.
int64_t settled_bytes(const testing::MemoryCounter& counter, int64_t expected) {
  for (int wait = 0; wait < 500 && counter.bytes() > expected; ++wait)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  return counter.bytes();
}

void expect_kept(const Config& config, const ParallelState& state) {
  const GPTModel model(config.model, config.parallel, state, GPTStage::whole(config.model),
                       {.dtype = parameter_dtype(config.train.precision)});
  const int64_t batch = config.train.micro_batch_size;
  const at::Tensor all = at::arange(batch * 41).remainder(300).view({batch, 41});
  const ProcessGroup group = state.group(GroupKind::cp);
  const at::Tensor ids = cut_for_context(all.slice(1, 0, -1), 1, group).contiguous();
  const at::Tensor labels = cut_for_context(all.slice(1, 1), 1, group).contiguous();
  const ActivationPlan plan = plan_activations(config, chunks_of_stage(config, 0).front(), 0);
  const testing::MemoryCounter counter;
  const at::Tensor losses = model.forward(ids, labels);
  EXPECT_EQ(settled_bytes(counter, plan.layers + plan.ends), plan.layers + plan.ends);
}

TEST(MemoryPlan, ActivationsOfContextParallelRanksAreWhatAutogradKeeps) {
  for (const auto& overrides : context_models())
    for (const auto& transport : transports()) {
      const auto set = with(with(overrides, transport), {"parallel.context_parallel_size=2"});
      SCOPED_TRACE(text_of(set));
      const Config config = small(set);
      testing::run_ranks(2, [&](const ParallelState& state) { expect_kept(config, state); },
                         {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
}

TEST(MemoryPlan, OneKeyHeadOfContextParallelRanksIsWhatAutogradKeeps) {
  for (const char* position : {"rope", "learned_absolute"})
    for (const char* transport : {"p2p", "all_gather"}) {
      const Config config = small({"parallel.context_parallel_size=2", "model.num_query_groups=1",
                                   std::string("model.position_embedding_type=") + position,
                                   std::string("parallel.cp_comm_type=") + transport});
      SCOPED_TRACE(fmt::format("{} {}", position, transport));
      testing::run_ranks(2, [&](const ParallelState& state) { expect_kept(config, state); },
                         {.sizes = parallel_options(config, c10::kCPU).sizes});
    }
}

TEST(MemoryPlan, CoresOfContextParallelRanksAreComputedAgain) {
  const auto working = [](const std::vector<std::string>& more) {
    const Config config =
        small(with({"parallel.context_parallel_size=2", "model.vocab_size=16",
                    "model.ffn_hidden_size=8", "model.recompute_granularity=selective"},
                   more));
    const ModelChunk layers = {.first_layer = 0, .num_layers = 3};
    return plan_activations(config, layers, 0).working;
  };
  // Of 60 tokens, each with 48 channels of queries, and as many of keys and of values.
  const int64_t heads = 60 * 48 * 4, weights = 60 * 4 * 4;
  EXPECT_EQ(working({"parallel.cp_comm_type=p2p"}), 2 * heads + weights);
  EXPECT_EQ(working({"parallel.cp_comm_type=all_gather"}), 4 * heads + weights);
  EXPECT_EQ(working({"parallel.cp_comm_type=a2a"}), 6 * heads + weights);
  EXPECT_EQ(working({"parallel.cp_comm_type_of_layers=p2p,all_gather,p2p"}), 4 * heads + weights);
}

}  // namespace
}  // namespace lockstep
