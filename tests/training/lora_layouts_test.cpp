// Low-rank adapters train the same on every layout: ten steps against one process.

#include <gtest/gtest.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/tests/training/layout_curves.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {
namespace {

using LoraLayoutsTest = testing::LayoutCurvesTest;
using Fields = std::vector<std::string>;

Fields both(Fields first, const Fields& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

const Fields kLora = {"lora.rank=3", "lora.alpha=6", "optimizer.lr=0.03"};
const Fields kAttention = both(kLora, {"model.num_query_groups=2"});
const Fields kAll =
    both(kAttention,
         {R"(lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])"});
const Fields kDropout = both(kAll, {"lora.dropout=0.25"});
const Fields kGpt2 =
    both(kLora, {"model.position_embedding_type=learned_absolute", "model.normalization=LayerNorm",
                 "model.add_bias_linear=true", "model.activation=gelu_tanh",
                 R"(lora.target_modules=["linear_fc1", "linear_proj"])"});
const Fields kUntied = both(kAll, {"model.untie_embeddings_and_output_weights=true"});
const Fields kExperts = both(kAttention, {"model.num_experts=4", "model.moe_aux_loss_coeff=0.02",
                                          "model.moe_shared_expert_intermediate_size=8"});
const Fields kSharded = {"ddp.use_distributed_optimizer=true"};
const Fields kOverlapped = {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=true",
                            "ddp.overlap_param_gather=true", "ddp.bucket_size=100"};

const char* const kTensorRanks = "tensor_model_parallel_size=2";
const char* const kStages = "pipeline_model_parallel_size=2";

TEST_F(LoraLayoutsTest, DenseModels) {
  for (const Fields& model : {kAttention, kAll, kDropout, kGpt2, kUntied}) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(model, " ")));
    expect_equal_to_one_process(model, 2, {kTensorRanks});
    expect_equal_to_one_process(model, 2, {kTensorRanks, "sequence_parallel=true"});
    expect_equal_to_one_process(model, 2, {kStages});
    expect_equal_to_one_process(model, 2, {"context_parallel_size=2"});
    expect_equal_to_one_process(both(model, kSharded), 2, {});
  }
}

TEST_F(LoraLayoutsTest, ModelsWithExperts) {
  expect_equal_to_one_process(kExperts, 2, {kTensorRanks});
  expect_equal_to_one_process(kExperts, 2, {kStages});
  expect_equal_to_one_process(kExperts, 2, {"context_parallel_size=2"});
  expect_equal_to_one_process(kExperts, 2, {"expert_model_parallel_size=2"});
  expect_equal_to_one_process(both(kExperts, kSharded), 4,
                              {kTensorRanks, "sequence_parallel=true",
                               "expert_model_parallel_size=2", "expert_tensor_parallel_size=1"});
}

TEST_F(LoraLayoutsTest, ThreeAndFourRanks) {
  const Fields thirds = both(kAll, {"train.global_batch_size=6", "model.num_layers=3"});
  expect_equal_to_one_process(both(thirds, kSharded), 3, {});
  expect_equal_to_one_process(thirds, 3, {"pipeline_model_parallel_size=3"});
  expect_equal_to_one_process(both(kAll, kOverlapped), 4, {kTensorRanks, kStages});
  expect_equal_to_one_process(both(kDropout, kSharded), 4,
                              {kTensorRanks, "context_parallel_size=2", "sequence_parallel=true"});
  // More ranks than query groups.
  expect_equal_to_one_process(kAll, 4, {"tensor_model_parallel_size=4"});
}

TEST_F(LoraLayoutsTest, SchedulesAndRecomputation) {
  const Fields four = both(kAll, {"model.num_layers=4"});
  expect_equal_to_one_process(four, 2, {kStages, "virtual_pipeline_model_parallel_size=2"});
  expect_equal_to_one_process(four, 2, {kStages, "pipeline_schedule=zb-h1"});
  expect_equal_to_one_process(both(kDropout, {"model.recompute_granularity=full"}), 2,
                              {kTensorRanks, "sequence_parallel=true"});
  expect_equal_to_one_process(both(four, {"model.recompute_granularity=full"}), 2,
                              {kStages, "pipeline_schedule=zb-h1"});
  expect_equal_to_one_process(both(kAll, {"model.recompute_granularity=selective"}), 2, {kStages});
}

TEST_F(LoraLayoutsTest, AStageWithoutLayersHasNothingToTrainAndIsRefused) {
  const Config empty = config(both(kAll, {"model.num_layers=1"}),
                              {kStages, "account_for_embedding_in_pipeline_split=true"});
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      [&] { check_supported(empty); },
      "lora.rank: found pipeline stage 0 without layers, allowed: layers on every stage"));
}

TEST_F(LoraLayoutsTest, OtherOptimizers) {
  expect_equal_to_one_process(both(kAll, {"optimizer.optimizer=muon"}), 2, {kTensorRanks});
  expect_equal_to_one_process(both(kAll, {"optimizer.optimizer=sgd", "optimizer.lr=0.5"}), 2,
                              {kTensorRanks});
}

}  // namespace
}  // namespace lockstep
