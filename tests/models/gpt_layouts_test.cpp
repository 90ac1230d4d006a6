#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/models/router_step.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/rank_threads.h"

// Ten steps of GPTModel on context- and expert-parallel ranks, in addition to tensor and data
// parallelism, compared with one process, in fp64.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;

constexpr int64_t kSteps = 10, kReplicas = 4, kBatch = 2;

struct Step {
  double loss = 0;
  double grad_norm = 0;
};

Config small_config(const std::vector<std::string>& overrides) {
  std::vector<std::string> all = {"model.num_layers=2",          "model.hidden_size=16",
                                  "model.num_attention_heads=4", "model.num_query_groups=4",
                                  "model.ffn_hidden_size=16",    "model.seq_length=16",
                                  "model.vocab_size=11",         "model.init_method_std=0.2",
                                  "optimizer.lr=0.02",           "optimizer.clip_grad=0.5"};
  all.insert(all.end(), overrides.begin(), overrides.end());
  return parse_config("", "test", all);
}

/// Inputs and labels of micro-batch `index` in step `step`.
at::Tensor ids(int64_t step, int64_t index) {
  const at::Tensor i = at::arange(kBatch * 17).view({kBatch, 17}) + 31 * step + 7 * index;
  return (i * i + 3 * i).remainder(11);
}

ParallelSizes sizes_of(const ParallelConfig& parallel) {
  return {.tensor = parallel.tensor_model_parallel_size,
          .context = parallel.context_parallel_size,
          .expert = parallel.expert_model_parallel_size,
          .expert_tensor = parallel.expert_tensor_parallel_size,
          .hierarchical_context = context_parallel_levels(parallel)};
}

/// The training loop of a data-parallel rank, with its share of kReplicas micro-batches.
std::vector<Step> train(const Config& config, const ParallelState& state) {
  GPTModel model(config.model, config.parallel, state, GPTStage::whole(config.model),
                 {.dtype = at::kDouble});
  DistributedDataParallel ddp(model, state, config.ddp);
  const auto optimizer = make_optimizer({&ddp}, config.optimizer);
  const ProcessGroup dp = state.group(GroupKind::dp), cp = state.group(GroupKind::cp);
  const int64_t share = kReplicas / dp.size();
  std::vector<Step> steps;
  for (int64_t step = 0; step < kSteps; ++step) {
    ddp.zero_grad_buffer();
    at::Tensor sums = at::zeros({2}, at::kDouble);
    for (int64_t m = 0; m < share; ++m) {
      std::optional<DistributedDataParallel::NoSyncGuard> guard;
      if (m + 1 < share) guard.emplace(ddp.no_sync());
      const at::Tensor batch = ids(step, m * dp.size() + dp.rank());
      const at::Tensor losses =
          model.forward({.tokens = cut_for_context(batch.narrow(1, 0, 16), 1, cp),
                         .labels = cut_for_context(batch.narrow(1, 1, 16), 1, cp)});
      sums[0] += losses.detach().sum();
      sums[1] += losses.numel();
      losses.sum().backward();
    }
    finalize_model_grads({&ddp}, sums[1], router_biases(model));
    end_router_step(model);
    all_reduce(state.group(GroupKind::dp_cp), sums, ReduceOp::sum, "loss").wait();
    steps.push_back({sums[0].item<double>() / sums[1].item<double>(), optimizer->step().grad_norm});
  }
  return steps;
}

using Overrides = std::vector<std::string>;

void expect_equal_to_one_process(const Overrides& model, int64_t world, const Overrides& layout) {
  SCOPED_TRACE(fmt::format("{} ranks: {}", world, fmt::join(layout, " ")));
  const Config whole = small_config(model);
  const std::vector<Step> expected = train(whole, ParallelState::single_process());
  Overrides overrides = model;
  for (const std::string& field : layout) overrides.push_back("parallel." + field);
  const Config config = small_config(overrides);
  run_ranks(world,
            [&](const ParallelState& state) {
              const std::vector<Step> found = train(config, state);
              for (size_t i = 0; i < expected.size(); ++i) {
                EXPECT_NEAR(found[i].loss, expected[i].loss, 1e-12) << "step " << i;
                EXPECT_NEAR(found[i].grad_norm, expected[i].grad_norm, 1e-11) << "step " << i;
              }
            },
            {.sizes = sizes_of(config.parallel)});
  EXPECT_LT(expected.back().loss, expected.front().loss);
}

TEST(GPTLayouts, ContextParallel) {
  for (const auto& communication : {"p2p", "all_gather", "a2a"})
    for (const int64_t ranks : {2, 4})
      expect_equal_to_one_process({}, ranks,
                                  {fmt::format("context_parallel_size={}", ranks),
                                   fmt::format("cp_comm_type={}", communication)});
  expect_equal_to_one_process({}, 4,
                              {"context_parallel_size=4", "cp_comm_type=a2a+p2p",
                               "hierarchical_context_parallel_sizes=2,2"});
}

TEST(GPTLayouts, EachLayerCommunicatesOverContextRanksInItsOwnWay) {
  const Overrides mixed = {"context_parallel_size=2", "cp_comm_type_of_layers=a2a,all_gather"};
  expect_equal_to_one_process({}, 2, mixed);
  const auto operations = [](const std::string& of_layers) {
    const Config config = small_config(
        {"parallel.context_parallel_size=2", "parallel.cp_comm_type_of_layers=" + of_layers});
    CollectiveLog log;
    run_ranks(2, [&](const ParallelState& state) { train(config, state); },
              {.sizes = sizes_of(config.parallel), .log = &log});
    std::map<std::string, size_t> calls;
    for (const CollectiveRecord& call : log.of_rank(0))
      if (call.group == "cp") ++calls[call.operation];
    return calls;
  };
  const auto exchanged = operations("a2a,a2a"), gathered = operations("all_gather,all_gather");
  EXPECT_GT(exchanged.at("all_to_all"), 0u);
  EXPECT_GT(gathered.at("all_gather"), 0u);
  auto halves = operations("a2a,all_gather");
  EXPECT_EQ(2 * halves["all_to_all"], exchanged.at("all_to_all"));
  EXPECT_EQ(2 * halves["all_gather"], gathered.at("all_gather"));
}

TEST(GPTLayouts, ContextBesideTensorAndDataParallel) {
  const Overrides groups = {"model.num_query_groups=2"};
  expect_equal_to_one_process(groups, 4, {"context_parallel_size=2"});
  expect_equal_to_one_process(groups, 4,
                              {"context_parallel_size=2", "tensor_model_parallel_size=2"});
  expect_equal_to_one_process(
      groups, 8,
      {"context_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true"});
  const Overrides learned = {"model.position_embedding_type=learned_absolute"};
  expect_equal_to_one_process(learned, 2, {"context_parallel_size=2"});
  expect_equal_to_one_process(
      learned, 4,
      {"context_parallel_size=2", "tensor_model_parallel_size=2", "sequence_parallel=true"});
}

TEST(GPTLayouts, ContextParallelWithRecomputation) {
  for (const auto& granularity : {"selective", "full"})
    expect_equal_to_one_process({fmt::format("model.recompute_granularity={}", granularity)}, 2,
                                {"context_parallel_size=2"});
}

const Overrides kExperts = {"model.num_experts=4", "model.moe_aux_loss_coeff=0.1",
                            "model.moe_z_loss_coeff=0.01"};

Overrides with(const Overrides& more) {
  Overrides all = kExperts;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(GPTLayouts, Experts) {
  for (const auto& dispatcher : {"alltoall", "allgather"}) {
    const Overrides model = with({fmt::format("model.moe_token_dispatcher_type={}", dispatcher)});
    expect_equal_to_one_process(model, 2, {"expert_model_parallel_size=2"});
    expect_equal_to_one_process(model, 4, {"expert_model_parallel_size=4"});
    expect_equal_to_one_process(model, 4, {"expert_model_parallel_size=2"});
    expect_equal_to_one_process(model, 2, {"expert_tensor_parallel_size=2"});
    expect_equal_to_one_process(model, 4,
                                {"tensor_model_parallel_size=2", "expert_model_parallel_size=2",
                                 "expert_tensor_parallel_size=1"});
    expect_equal_to_one_process(
        model, 4,
        {"tensor_model_parallel_size=2", "expert_model_parallel_size=2", "sequence_parallel=true"});
  }
}

TEST(GPTLayouts, ExpertsBesideContextParallel) {
  const Overrides model = with({"model.moe_layer_freq=2", "model.moe_ffn_hidden_size=8",
                                "model.moe_shared_expert_intermediate_size=8"});
  expect_equal_to_one_process(model, 4,
                              {"context_parallel_size=2", "expert_model_parallel_size=2"});
  expect_equal_to_one_process(
      model, 8,
      {"context_parallel_size=2", "tensor_model_parallel_size=2", "expert_model_parallel_size=2",
       "expert_tensor_parallel_size=1", "sequence_parallel=true"});
}

TEST(GPTLayouts, ExpertsWithCapacityAndRecomputation) {
  for (const auto& pad : {"false", "true"})
    expect_equal_to_one_process(
        with({"model.moe_expert_capacity_factor=0.9", "model.recompute_granularity=full",
              fmt::format("model.moe_pad_expert_input_to_capacity={}", pad)}),
        4, {"expert_model_parallel_size=2", "context_parallel_size=2"});
}

TEST(GPTLayouts, ExpertsBalancedByABias) {
  const Overrides model = {"model.num_experts=4", "model.moe_router_score_function=sigmoid",
                           "model.moe_router_enable_expert_bias=true",
                           "model.moe_router_bias_update_rate=0.05"};
  expect_equal_to_one_process(model, 4,
                              {"expert_model_parallel_size=2", "context_parallel_size=2"});
}

TEST(GPTLayouts, ExpertsWithTheDistributedOptimizer) {
  expect_equal_to_one_process(with({"ddp.use_distributed_optimizer=true"}), 4,
                              {"expert_model_parallel_size=2"});
  expect_equal_to_one_process(with({"ddp.use_distributed_optimizer=true"}), 4,
                              {"context_parallel_size=2", "expert_model_parallel_size=2"});
}

}  // namespace
}  // namespace lockstep
