// The reference GPT trains the same on layouts of context and expert parallelism, beside tensor,
// pipeline and data parallelism.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/parallel_state/planning.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::run_ranks;
using testing::TemporaryFolder;
using Overrides = std::vector<std::string>;

class ContextExpertLayoutsTest : public ::testing::Test {
 protected:
  ContextExpertLayoutsTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const Overrides& model, const Overrides& layout) const {
    // 7 windows of validation text, which two ranks cannot share evenly.
    Overrides all = {"data.path=" + path_, "data.split=97,3", "train.precision=fp64"};
    all.insert(all.end(), model.begin(), model.end());
    for (const std::string& field : layout) all.push_back("parallel." + field);
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
        "seq_length: 16 vocab_size: 256 init_method_std: 0.1 } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 100 train_iters: 10 } "
        "parallel { desync_check_interval: 2 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Losses and norms of all steps, then the validation loss; the same on all ranks.
  static std::vector<double> curve(const Config& config, int64_t world) {
    testing::RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    std::vector<double> result;
    std::mutex mutex;
    run_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          std::vector<double> curve;
          TrainCallbacks callbacks;
          callbacks.iteration = [&](const IterationMetrics& metrics) {
            curve.push_back(metrics.lm_loss);
            curve.push_back(metrics.grad_norm);
          };
          callbacks.validation = [&](const ValidationMetrics& metrics) {
            curve.push_back(metrics.validation_loss);
          };
          trainer.run(callbacks);
          const std::lock_guard<std::mutex> lock(mutex);
          EXPECT_TRUE(result.empty() || curve == result) << state.rank();
          result = curve;
        },
        options);
    return result;
  }

  void expect_equal_to_one_process(const Overrides& model, int64_t world,
                                   const Overrides& layout) const {
    expect_equal(model, world, layout, 1e-12);
  }

  void expect_equal_in_fp32(Overrides model, int64_t world, const Overrides& layout) const {
    model.emplace_back("train.precision=fp32");
    expect_equal(model, world, layout, 2e-5);
  }

 private:
  /// Of one process; the same models come again.
  const std::vector<double>& expected_curve(const Overrides& model) const {
    static std::map<Overrides, std::vector<double>> curves;
    std::vector<double>& found = curves[model];
    if (found.empty()) found = curve(config(model, {}), 1);
    return found;
  }

  void expect_equal(const Overrides& model, int64_t world, const Overrides& layout,
                    double tolerance) const {
    const std::vector<double>& expected = expected_curve(model);
    const std::vector<double> found = curve(config(model, layout), world);
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_EQ(expected.size(), 21U);
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], tolerance * std::abs(expected[i]))
          << i << ", " << world << " ranks: " << fmt::format("{}", fmt::join(layout, " "));
    EXPECT_LT(expected[18], expected[0]);
  }

  TemporaryFolder folder_;
  std::string path_;
};

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
