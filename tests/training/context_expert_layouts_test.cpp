// The reference GPT trains the same on layouts of context and expert parallelism, combined with
// tensor, pipeline and data parallelism.

#include <gtest/gtest.h>

#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/training/layout_curves.h"

namespace lockstep {
namespace {

using Overrides = std::vector<std::string>;

using ContextExpertLayoutsTest = testing::LayoutCurvesTest;

const Overrides kDense = {};
const Overrides kExperts = {"model.num_experts=4", "model.moe_aux_loss_coeff=0.05",
                            "model.moe_z_loss_coeff=0.001"};

const char* const kTensor = "tensor_model_parallel_size=2";
const char* const kPipeline = "pipeline_model_parallel_size=2";
const char* const kContext = "context_parallel_size=2";
const char* const kExpert = "expert_model_parallel_size=2";
const char* const kSequence = "sequence_parallel=true";

TEST_F(ContextExpertLayoutsTest, ContextParallel) {
  expect_equal_to_one_process(kDense, 2, {kContext});
  expect_equal_to_one_process(kDense, 4, {"context_parallel_size=4", "cp_comm_type=all_gather"});
  expect_equal_to_one_process(kDense, 4, {"context_parallel_size=4", "cp_comm_type=a2a"});
  expect_equal_to_one_process(kDense, 4,
                              {"context_parallel_size=4", "cp_comm_type=a2a+p2p",
                               "hierarchical_context_parallel_sizes=2,2"});
}

TEST_F(ContextExpertLayoutsTest, ContextBesideTheOtherAxes) {
  expect_equal_to_one_process(kDense, 4, {kContext});
  expect_equal_to_one_process(kDense, 4, {kContext, kTensor});
  expect_equal_to_one_process(kDense, 4, {kContext, kPipeline});
  expect_equal_to_one_process(kDense, 8, {kContext, kPipeline, kTensor, kSequence});
  expect_equal_to_one_process({"ddp.use_distributed_optimizer=true"}, 8,
                              {"context_parallel_size=4"});
  expect_equal_to_one_process(kDense, 8, {"context_parallel_size=4", kTensor});
  expect_equal_to_one_process(kDense, 8, {"context_parallel_size=4", kPipeline});
  expect_equal_to_one_process({"ddp.average_in_collective=true"}, 4, {kContext});
  expect_equal_to_one_process({"model.hidden_dropout=0.1"}, 4, {kContext, kTensor});
}

TEST_F(ContextExpertLayoutsTest, Experts) {
  expect_equal_to_one_process(kExperts, 2, {kExpert});
  expect_equal_to_one_process(kExperts, 4, {"expert_model_parallel_size=4"});
  expect_equal_to_one_process(kExperts, 4, {kExpert, kPipeline});
  expect_equal_to_one_process(kExperts, 4,
                              {kExpert, kTensor, "expert_tensor_parallel_size=1", kSequence});
  Overrides gathered = kExperts;
  gathered.emplace_back("model.moe_token_dispatcher_type=allgather");
  gathered.emplace_back("model.moe_expert_capacity_factor=1");
  expect_equal_to_one_process(gathered, 4, {kExpert, kContext});
}

TEST_F(ContextExpertLayoutsTest, ExpertsOverAnyNumberOfRanks) {
  Overrides six = kExperts;
  for (const char* field : {"model.num_experts=6", "model.moe_ffn_hidden_size=12",
                            "model.add_bias_linear=true", "train.global_batch_size=6"})
    six.emplace_back(field);
  expect_equal_to_one_process(six, 6,
                              {"expert_model_parallel_size=3", "expert_tensor_parallel_size=2"});
  expect_equal_to_one_process(six, 6,
                              {kTensor, kExpert, "expert_tensor_parallel_size=3", kSequence});
}

TEST_F(ContextExpertLayoutsTest, SinglePrecision) {
  expect_equal_in_fp32(kDense, 4, {kContext, kTensor});
  expect_equal_in_fp32(kDense, 4, {"context_parallel_size=4", "cp_comm_type=all_gather"});
  expect_equal_in_fp32(kExperts, 4, {kExpert, kContext});
}

TEST_F(ContextExpertLayoutsTest, ExpertsWhereLossesAreAveraged) {
  Overrides model = kExperts;
  model.emplace_back("ddp.calculate_per_token_loss=false");
  expect_equal_to_one_process(model, 4, {kExpert, kPipeline});
  expect_equal_to_one_process(model, 4, {kExpert, kContext});
  model.emplace_back("optimizer.loss_scale=1024");
  expect_equal_to_one_process(model, 2, {kExpert});
}

TEST_F(ContextExpertLayoutsTest, ExpertsBalancedByABias) {
  expect_equal_to_one_process(
      {"model.num_experts=4", "model.moe_router_score_function=sigmoid",
       "model.moe_router_enable_expert_bias=true", "model.moe_router_bias_update_rate=0.05"},
      4, {kExpert, kPipeline});
}

const Overrides kFiveDimensions = {kTensor, kContext,  kPipeline,
                                   kExpert, kSequence, "expert_tensor_parallel_size=1"};

TEST_F(ContextExpertLayoutsTest, FiveDimensions) {
  expect_equal_to_one_process(kExperts, 16, kFiveDimensions);
}

TEST_F(ContextExpertLayoutsTest, AllRanksOfFiveDimensionsDoTheSame) {
  const Config job = config(kExperts, kFiveDimensions);
  ParallelSizes sizes = parallel_options(job, c10::kCPU).sizes;
  sizes.world_size = 16;
  const auto step = [&](const ParallelState& state) {
    Trainer trainer(job, state);
    trainer.train_step();
    trainer.validate();
  };
  EXPECT_EQ(verify_collectives(sizes, step), std::nullopt);
}

}  // namespace
}  // namespace lockstep
