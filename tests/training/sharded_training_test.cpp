// The reference GPT with sharded gradients and parameters (ddp.data_parallel_sharding_strategy) on
// every kind of layout of dense layers.

#include <gtest/gtest.h>

#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/training/sharded_curves.h"

namespace lockstep {
namespace {

using namespace testing;

TEST_F(ShardedTrainingTest, DataParallelWithAndWithoutAccumulation) {
  expect_all_equal({}, 2, {});
  expect_all_equal({"train.global_batch_size=6", "model.vocab_size=257"}, 3, {});
  expect_all_equal({"model.untie_embeddings_and_output_weights=true"}, 4, {});
  expect_all_equal({"model.position_embedding_type=learned_absolute", "model.num_layers=1"}, 2, {});
}

TEST_F(ShardedTrainingTest, RecomputedLayers) {
  expect_all_equal({"model.recompute_granularity=full"}, 2, {});
  expect_all_equal({"model.recompute_granularity=selective", "model.hidden_dropout=0.1"}, 2, {});
}

TEST_F(ShardedTrainingTest, BesideTensorAndContextParallelism) {
  expect_all_equal({}, 4, {kTensor, kSequence});
  expect_all_equal({}, 4, {kContext});
}

TEST_F(ShardedTrainingTest, BesidePipelines) {
  expect_all_equal({}, 4, {kPipeline});
  expect_all_equal({"model.num_layers=4"}, 4,
                   {kPipeline, "virtual_pipeline_model_parallel_size=2"});
  expect_all_equal({"model.untie_embeddings_and_output_weights=true"}, 4,
                   {kPipeline, "pipeline_schedule=zb-h1"});
}

TEST_F(ShardedTrainingTest, AdaptersBesideFrozenWeights) {
  expect_all_equal({"lora.rank=2", "lora.alpha=4", "optimizer.lr=0.02"}, 2, {});
}

TEST_F(ShardedTrainingTest, InsideOfOptimizerInstances) {
  expect_all_equal({}, 4, {"num_distributed_optimizer_instances=2"});
}

/// Only the norm adds up other pieces. Where fp32 buffers take the gradients of bf16 weights, whole
/// buffers add them without rounding first, and sharded buffers round them.
TEST_F(ShardedTrainingTest, TheBitsAreThoseOfTheShardedOptimizer) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const char* precision : {"train.precision=fp32", "train.precision=bf16"})
    for (const auto& [world, layout] : std::vector<std::pair<int64_t, Overrides>>{
             {2, {}}, {4, {}}, {4, {kPipeline}}, {4, {kTensor}}}) {
      const Overrides model = {precision, "optimizer.clip_grad=0", "ddp.grad_reduce_in_fp32=false"};
      expect_bits_of_optim(model, world, layout);
    }
}

TEST_F(ShardedTrainingTest, AllRanksDoTheSame) {
  for (const Overrides& layout :
       std::vector<Overrides>{{kTensor, kPipeline, kSequence}, {kContext, kPipeline}}) {
    const Config job = config(with(kParams, {kAhead}), layout);
    ParallelSizes sizes = parallel_options(job, c10::kCPU).sizes;
    sizes.world_size = 8;
    const auto step = [&](const ParallelState& state) {
      Trainer trainer(job, state);
      trainer.train_step();
      trainer.train_step();
      trainer.validate();
    };
    EXPECT_EQ(verify_collectives(sizes, step), std::nullopt);
  }
}

/// Losses of four steps. Between steps each rank reads another weight, as in a save.
std::vector<double> losses_with_reads(const Config& job, int64_t world) {
  std::vector<double> losses;
  RankThreadOptions options;
  options.sizes = parallel_options(job, c10::kCPU).sizes;
  options.timeout = std::chrono::seconds(20);
  run_ranks(
      world,
      [&](const ParallelState& state) {
        Trainer trainer(job, state);
        std::vector<double> own;
        for (int step = 0; step < 4; ++step) {
          own.push_back(trainer.train_step().lm_loss);
          const std::vector<StateTensor> weights = trainer.state(/*with_optimizer=*/false);
          const auto count = static_cast<int64_t>(weights.size());
          weights[static_cast<size_t>(state.rank() * count / world)].values.sum();
        }
        if (state.rank() == 0) losses = own;
      },
      options);
  return losses;
}

TEST_F(ShardedTrainingTest, RanksMayReadDifferentWeightsBetweenSteps) {
  for (const int64_t world : {2, 3, 4})
    for (const int64_t layers : {1, 2, 3}) {
      const Overrides model = {fmt::format("model.num_layers={}", layers),
                               fmt::format("train.global_batch_size={}", 2 * world),
                               "optimizer.clip_grad=0"};
      const std::vector<double> expected =
          losses_with_reads(config(with(model, kOptim), {}), world);
      EXPECT_EQ(losses_with_reads(config(with(model, with(kParams, {kAhead})), {}), world),
                expected)
          << world << " ranks, " << layers << " layers";
    }
}

TEST_F(ShardedTrainingTest, ARankHoldsWhatThePlanSays) {
  for (const auto& [world, microbatches, model, layout] :
       std::vector<std::tuple<int64_t, int64_t, Overrides, Overrides>>{
           {2, 1, {"model.num_layers=6"}, {}},
           {2, 2, {"model.num_layers=6"}, {}},
           {3, 1, {"model.num_layers=3", "model.untie_embeddings_and_output_weights=true"}, {}},
           {2, 1, {"model.num_layers=4", "train.precision=bf16"}, {}},
           {4, 2, {"model.num_layers=4"}, {kPipeline}}})
    for (const Overrides& strategy : {kGrads, kParams, with(kParams, {kAhead})}) {
      const int64_t replicas = layout == Overrides{kPipeline} ? world / 2 : world;
      const Config job =
          config(with(with(model, strategy),
                      {"train.global_batch_size=" + std::to_string(replicas * microbatches)}),
                 layout);
      SCOPED_TRACE(
          fmt::format("{} ranks: {}, {}", world, fmt::join(model, " "), fmt::join(strategy, " ")));
      expect_memory_as_planned(job, world);
    }
}

}  // namespace
}  // namespace lockstep
