// The reference GPT with experts and sharded gradients and parameters
// (ddp.data_parallel_sharding_strategy): a layer's experts are a piece of their own, over
// expert-dp.

#include <gtest/gtest.h>

#include "lockstep/models/router.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/sharded_step.h"
#include "lockstep/tests/training/sharded_curves.h"

namespace lockstep {
namespace {

using namespace testing;

using ShardedExpertsTest = ShardedTrainingTest;

const Overrides kExperts = {"model.num_experts=4", "model.moe_aux_loss_coeff=0.05"};
const Overrides kShared = with(kExperts, {"model.moe_shared_expert_intermediate_size=12"});
const char* const kWholeExperts = "expert_tensor_parallel_size=1";

TEST_F(ShardedExpertsTest, WithoutExpertParallelism) {
  expect_all_equal(kShared, 4, {});
  expect_all_equal(with(kExperts, {"model.moe_layer_freq=[0, 1]"}), 2, {});
  expect_all_equal(with(kExperts, {"model.moe_token_dispatcher_type=allgather"}), 2, {});
}

TEST_F(ShardedExpertsTest, WithExpertParallelism) {
  expect_all_equal(kShared, 2, {kExpert});  // no rank has a replica of the experts
  expect_all_equal(kShared, 4, {kExpert});
  expect_all_equal(with(kExperts, {"model.add_bias_linear=true", "model.activation=gelu"}), 4,
                   {kExpert});
}

TEST_F(ShardedExpertsTest, BesideTensorAndContextParallelism) {
  expect_all_equal(kShared, 4, {kExpert, kTensor, kWholeExperts, kSequence});
  expect_all_equal(kExperts, 2, {kTensor, kWholeExperts});  // only experts have replicas
  expect_all_equal(kExperts, 8, {kExpert, kTensor, kSequence}, {kParams});
  expect_all_equal(kExperts, 4, {kExpert, kContext});
}

TEST_F(ShardedExpertsTest, BesidePipelines) {
  expect_all_equal(kExperts, 4, {kExpert, kPipeline});
  expect_all_equal(kExperts, 8, {kExpert, kPipeline}, {kParams, with(kParams, {kAhead})});
  expect_all_equal(with(kExperts, {"model.num_layers=4"}), 4,
                   {kPipeline, "virtual_pipeline_model_parallel_size=2"});
}

TEST_F(ShardedExpertsTest, RecomputedLayers) {
  expect_all_equal(with(kShared, {"model.recompute_granularity=full"}), 4, {kExpert});
  expect_all_equal(with(kExperts, {"model.recompute_granularity=selective"}), 4, {kExpert});
}

TEST_F(ShardedExpertsTest, InsideOfOptimizerInstances) {
  expect_all_equal(kExperts, 4, {"num_distributed_optimizer_instances=2"});
  expect_all_equal(with(kExperts, {"train.global_batch_size=8"}), 8,
                   {kExpert, "num_distributed_optimizer_instances=2"}, {kParams});
}

TEST_F(ShardedExpertsTest, TheBitsAreThoseOfTheShardedOptimizer) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const char* precision : {"train.precision=fp32", "train.precision=bf16"})
    for (const auto& [world, layout] :
         std::vector<std::pair<int64_t, Overrides>>{{4, {}},
                                                    {2, {kExpert}},
                                                    {4, {kExpert}},
                                                    {4, {kExpert, kTensor, kSequence}},
                                                    {4, {kExpert, kPipeline}}}) {
      const Overrides rest = {precision, "optimizer.clip_grad=0", "ddp.grad_reduce_in_fp32=false"};
      expect_bits_of_optim(with(kShared, rest), world, layout);
    }
}

/// Sends all tokens of a rank to two of the four experts. The step and the rank's position in
/// expert-dp decide which.
void force_routing(const Trainer& trainer, const ParallelState& state, int step) {
  const bool second = (state.group(GroupKind::expert_dp).rank() + step) % 2 == 1;
  for (const auto& chunk : trainer.training_model().chunks())
    for (const auto& router : find_routers(*chunk)) {
      const int64_t first = second ? 2 : 0;
      at::Tensor(router->expert_bias()).fill_(0).slice(0, first, first + 2).fill_(1000);
    }
}

/// Losses and final weights of the last rank, which has no token for its experts in every second
/// step.
std::vector<at::Tensor> forced_run(const Config& job, int64_t world) {
  RankThreadOptions options;
  options.sizes = parallel_options(job, c10::kCPU).sizes;
  std::vector<at::Tensor> result;
  run_ranks(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(job, state);
        std::vector<at::Tensor> found;
        for (int step = 0; step < 6; ++step) {
          force_routing(trainer, state, step);
          found.push_back(at::full({}, trainer.train_step().lm_loss, at::kDouble));
        }
        (void)trainer.state(/*with_optimizer=*/false);  // gathers what is sharded
        for (const auto& chunk : trainer.training_model().chunks())
          for (const at::Tensor& param : chunk->parameters())
            found.push_back(param.detach().clone());
        const at::NoGradGuard no_grad;
        const auto routers = find_routers(*trainer.training_model().chunks().front());
        const at::Tensor chosen =
            routers.front()->forward(at::ones({5, 2, 16}, at::kDouble)).map.sum(0);
        const bool second = state.group(GroupKind::expert_dp).rank() % 2 == 0;  // after step 5
        EXPECT_EQ(chosen.slice(0, second ? 0 : 2, second ? 2 : 4).sum().item<int64_t>(), 0);
        if (state.rank() == world - 1) result = found;
      },
      options);
  return result;
}

/// Of the two ranks that hold an expert, one has tokens for it when the other has none.
TEST_F(ShardedExpertsTest, RanksWithoutTokensGatherAndReduceAsTheOthers) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const Overrides forced =
      with(kExperts, {"model.moe_router_score_function=sigmoid",
                      "model.moe_router_enable_expert_bias=true", "optimizer.clip_grad=0"});
  for (const Overrides& layout : std::vector<Overrides>{{kExpert}, {}, {kExpert, kPipeline}})
    for (const char* more : {"model.recompute_granularity=none", "model.recompute_granularity=full",
                             "model.moe_token_dispatcher_type=allgather"}) {
      const Overrides model = with(forced, {more});
      const int64_t world = layout.size() == 2 ? 8 : 4;
      const auto expected = forced_run(config(with(model, kOptim), layout), world);
      for (const Overrides& strategy : {kGrads, kParams, with(kParams, {kAhead})}) {
        const auto found = forced_run(config(with(model, strategy), layout), world);
        ASSERT_EQ(found.size(), expected.size());
        for (size_t i = 0; i < expected.size(); ++i)
          EXPECT_TRUE(at::equal(found[i], expected[i]))
              << i
              << fmt::format(": {}, {}, {}", more, fmt::join(layout, " "),
                             fmt::join(strategy, " "));
      }
    }
}

/// Traffic of rank 0 in its third step, by group.
std::map<std::string, ShardedTraffic> sent_in_step(const Config& job, int64_t world,
                                                   std::map<std::string, int64_t>& units) {
  CollectiveLog log;
  size_t before = 0, after = 0;
  RankThreadOptions options;
  options.sizes = parallel_options(job, c10::kCPU).sizes;
  options.log = &log;
  run_ranks(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(job, state);
        for (int step = 0; step < 3; ++step) {
          if (state.rank() == 0) before = log.of_rank(0).size();
          trainer.train_step();
          if (state.rank() == 0) after = log.of_rank(0).size();
        }
        if (state.rank() == 0) units = shard_bytes(trainer);
      },
      options);
  std::map<std::string, ShardedTraffic> sent;
  const auto calls = log.of_rank(0);
  for (size_t i = before; i < after; ++i) {
    const std::string& label = calls[i].label;
    ShardedTraffic& one = sent[calls[i].group];
    if (label.starts_with("parameters '")) ++one.gathers, one.gathered += calls[i].bytes;
    if (label.starts_with("bucket ")) ++one.reductions, one.reduced += calls[i].bytes;
  }
  return sent;
}

TEST_F(ShardedExpertsTest, AStepSendsWhatTheFormulaSays) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t microbatches : {1, 3})
    for (const char* recompute : {"none", "full"}) {
      SCOPED_TRACE(fmt::format("{} micro-batches, recompute {}", microbatches, recompute));
      const Config job = config(
          with(with(kShared, kParams), {"model.untie_embeddings_and_output_weights=true",
                                        fmt::format("train.global_batch_size={}", 4 * microbatches),
                                        fmt::format("model.recompute_granularity={}", recompute)}),
          {kExpert});
      std::map<std::string, int64_t> units;
      auto sent = sent_in_step(job, 4, units);
      int64_t experts = 0;
      for (const auto& [name, bytes] : units) experts += is_of_experts(name) ? bytes : 0;
      EXPECT_EQ(units.size(), 2 + 5U);  // each layer's experts are separate
      // fc1 with its gate and fc2 of two of the four experts, over two ranks.
      EXPECT_EQ(experts, 2 * 2 * 3 * 16 * 16 * 8 / 2);
      EXPECT_EQ(sent.at("expert-dp"), expected_traffic(units, true, microbatches, 2));
      EXPECT_EQ(sent.at("expert-dp").gathers, 2 * 2 * microbatches);
      EXPECT_EQ(sent.at("dp-cp"), expected_traffic(units, false, microbatches, 4));
      EXPECT_EQ(sent.at("dp-cp").gathers, (2 * 5 - 2) * microbatches);
    }
}

TEST_F(ShardedExpertsTest, ARankKeepsEighteenBytesOfAParameterOverItsReplicas) {
  const Config job = config(with(with(kExperts, kParams), {"train.precision=bf16"}), {kExpert});
  RankThreadOptions options;
  options.sizes = parallel_options(job, c10::kCPU).sizes;
  run_ranks(
      4,
      [&](const ParallelState& state) {
        const TrainingModel model(job, state);
        const auto optimizer = make_optimizer(model.wrappers(), job.optimizer);
        int64_t bytes = optimizer->state_bytes(), shares = 0;
        for (const ParamAndGradBuffer* buffer : model.wrappers().front()->buffers()) {
          bytes += buffer->kept_param_bytes() + buffer->kept_grad_bytes();
          const bool expert = buffer->params().front().description.is_expert;
          shares += buffer->layout().numel / (expert ? 2 : 4);
        }
        EXPECT_EQ(bytes, 18 * shares);
      },
      options);
}

TEST_F(ShardedExpertsTest, ARankHoldsWhatThePlanSays) {
  for (const auto& [world, layout] :
       std::vector<std::pair<int64_t, Overrides>>{{2, {}}, {2, {kExpert}}, {4, {kExpert}}})
    for (const char* microbatches : {"4", "8"})
      for (const Overrides& strategy : {kGrads, kParams, with(kParams, {kAhead})}) {
        SCOPED_TRACE(fmt::format("{} ranks: {}, {}, batch {}", world, fmt::join(layout, " "),
                                 fmt::join(strategy, " "), microbatches));
        expect_memory_as_planned(
            config(with(with(kShared, strategy),
                        {"model.num_layers=4",
                         std::string("train.global_batch_size=") + microbatches}),
                   layout),
            world);
      }
}

TEST_F(ShardedExpertsTest, AllRanksDoTheSame) {
  for (const Overrides& layout :
       std::vector<Overrides>{{kExpert, kPipeline}, {kExpert, kTensor, kWholeExperts, kSequence}}) {
    const Config job = config(with(with(kShared, kParams), {kAhead}), layout);
    ParallelSizes sizes = parallel_options(job, c10::kCPU).sizes;
    sizes.world_size = 8;
    EXPECT_EQ(verify_collectives(sizes,
                                 [&](const ParallelState& state) {
                                   Trainer trainer(job, state);
                                   trainer.train_step();
                                   trainer.train_step();
                                   trainer.validate();
                                 }),
              std::nullopt);
  }
}

/// If no rank has a replica of the experts, the next piece is the next layer's.
TEST_F(ShardedExpertsTest, AnEvaluationGathersAheadOfExpertsThatLieWhole) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const Config job = config(with(with(kExperts, kParams), {kAhead}), {kExpert});
  CollectiveLog log;
  RankThreadOptions options;
  options.sizes = parallel_options(job, c10::kCPU).sizes;
  options.log = &log;
  size_t before = 0;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const Trainer trainer(job, state);
        if (state.rank() == 0) before = log.of_rank(0).size();
        trainer.validate();
      },
      options);
  const auto calls = log.of_rank(0);
  bool found = false;
  for (size_t i = before; i < calls.size() && !found; ++i) {
    EXPECT_NE(calls[i].label, "tokens of the experts") << "before the second layer's gather";
    found = calls[i].label.starts_with("parameters 'decoder.layers.1.");
    if (calls[i].label == "tokens of the experts") break;
  }
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace lockstep
