// Runs that multiply in 8-bit floats: equal on every layout except for rounding, and undisturbed by
// what a run does between its steps.

#include <gtest/gtest.h>

#include <cstdlib>

#include "lockstep/tests/training/checked_runs.h"
#include "lockstep/training/batch_input.h"
#include "lockstep/training/training_model.h"

namespace lockstep {
namespace {

using testing::Fields;
using testing::with;

/// On an Intel Xeon, MKL's products in a pipeline stage differed in the last bits from those of one
/// process, both with its AVX2 and with its AVX-512 code. With this setting they are equal.
[[maybe_unused]] const int kSameProducts = ::setenv("MKL_CBWR", "COMPATIBLE", /*overwrite=*/1);

const Fields kFp8 = {"train.precision=fp32",         "train.fp8=hybrid",
                     "train.fp8_amax_history_len=4", "model.hidden_size=64",
                     "model.ffn_hidden_size=64",     "model.num_layers=4"};

class Fp8TrainingTest : public testing::CheckedRunsTest {
 protected:
  /// How ranks change the sums of one process: they add up parts of them; they add the same numbers
  /// in another order (gradients of micro-batches); not at all, if the norm does not clip.
  enum class Sums { parts, order, same };

  /// Ten steps on `world` ranks against one process. Where the last bits of a sum differ, a value
  /// is now and then rounded to another 8-bit number. From then on runs are only close: after the
  /// first step with parts of sums, after four with another order, never with the same sums.
  void expect_close(const Fields& given, int64_t world, const Fields& layout,
                    Sums sums = Sums::parts) const {
    const Fields model = sums == Sums::same ? with(given, {"optimizer.clip_grad=0"}) : given;
    const size_t same = sums == Sums::same ? SIZE_MAX : sums == Sums::order ? 8 : 0;
    const std::vector<double> expected = curve(config(model, {}), 1);
    const std::vector<double> found = curve(config(model, layout), world);
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < expected.size(); ++i) {
      const bool norm = i % 2 == 1 && i + 1 < expected.size();
      const double later = norm ? 0.2 : 0.02;
      EXPECT_NEAR(found[i] / expected[i], 1,
                  i < same ? 1e-6
                  : i < 2  ? 1e-3
                           : later)
          << i << ", " << world << " ranks: " << fmt::format("{}", fmt::join(layout, " "));
    }
  }
};

TEST_F(Fp8TrainingTest, LearnsAsInBf16) {
  Fields bf16 = kFp8;
  bf16[1] = "train.fp8=none";
  bf16.erase(bf16.begin() + 2);
  const std::vector<double> wide = curve(config(bf16, {}), 1);
  for (const Fields& more :
       {Fields{}, Fields{"train.fp8=e4m3"}, Fields{"train.fp8_amax_compute_algo=most_recent"},
        Fields{"train.fp8_margin=1"}}) {
    const std::vector<double> narrow = curve(config(with(kFp8, more), {}), 1);
    for (size_t i = 0; i < wide.size(); i += 2) EXPECT_NEAR(narrow[i] / wide[i], 1, 0.02) << i;
    EXPECT_NE(narrow[0], wide[0]);
  }
  for (const char* const recipe : {"tensorwise", "rowwise"}) {
    Fields other = bf16;
    other[1] = "train.fp8=e4m3";
    other.push_back(std::string("train.fp8_recipe=") + recipe);
    const std::vector<double> narrow = curve(config(other, {}), 1);
    for (size_t i = 0; i < wide.size(); i += 2) EXPECT_NEAR(narrow[i] / wide[i], 1, 0.02) << i;
    EXPECT_NE(narrow[0], wide[0]);
  }
}

/// The loss of one sample. Unlike a run, a model may leave all layers in bf16.
double first_loss(const Config& config) {
  const ParallelState state = ParallelState::single_process();
  const int64_t length = config.model.seq_length;
  std::vector<int64_t> ids(static_cast<size_t>(length + 1));
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * i % 256);
  TrainingModel model(config, state);
  model.zero_grad_buffer();
  const LossSums sums = model.forward_backward(1, 1, [&](int64_t) {
    return make_batch_input(ids, std::vector<SampleMarks>(1), length, 1, state);
  });
  model.finalize_gradients(sums.tokens);
  return sums.loss.item<double>();
}

TEST_F(Fp8TrainingTest, LayersThatStayInBf16) {
  Fields bf16 = kFp8;
  bf16[1] = "train.fp8=none";
  bf16.erase(bf16.begin() + 2);
  const auto first = [&](const Fields& fields) { return first_loss(config(fields, {})); };
  const double wide = first(bf16), narrow = first(kFp8);
  EXPECT_EQ(first(with(kFp8, {"train.num_layers_at_start_in_bf16=4"})), wide);
  EXPECT_EQ(first(with(kFp8, {"train.num_layers_at_start_in_bf16=1",
                              "train.num_layers_at_end_in_bf16=3"})),
            wide);
  const double some = first(with(kFp8, {"train.num_layers_at_end_in_bf16=1"}));
  EXPECT_NE(some, wide);
  EXPECT_NE(some, narrow);
}

TEST_F(Fp8TrainingTest, TheLayoutDoesNotMatter) {
  expect_close(kFp8, 2, {"tensor_model_parallel_size=2"});
  expect_close(kFp8, 2, {"tensor_model_parallel_size=2", "sequence_parallel=true"});
  expect_close(kFp8, 2, {"pipeline_model_parallel_size=2"}, Sums::same);
  expect_close(kFp8, 2,
               {"pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"},
               Sums::same);
  expect_close(kFp8, 2, {"pipeline_model_parallel_size=2", "pipeline_schedule=zb-h1"}, Sums::same);
  const Fields sharded = with(kFp8, {"ddp.use_distributed_optimizer=true"});
  expect_close(sharded, 2, {}, Sums::order);
  expect_close(with(sharded, {"ddp.data_parallel_sharding_strategy=optim_grads_params"}), 2, {},
               Sums::order);
  expect_close(with(kFp8, {"model.seq_length=32"}), 2, {"context_parallel_size=2"});
  expect_close(with(kFp8, {"model.recompute_granularity=full"}), 4,
               {"tensor_model_parallel_size=2", "pipeline_model_parallel_size=2"});
}

const Fields kFp8Experts = with(kFp8, {"model.num_experts=4", "model.moe_router_topk=2",
                                       "model.moe_shared_expert_intermediate_size=32"});

TEST_F(Fp8TrainingTest, ExpertsLearnAsInBf16) {
  Fields bf16 = kFp8Experts;
  bf16[1] = "train.fp8=none";
  bf16.erase(bf16.begin() + 2);
  const std::vector<double> wide = curve(config(bf16, {}), 1);
  std::vector<std::vector<double>> curves;
  for (const Fields& more : {Fields{}, Fields{"train.fp8=e4m3"}})
    curves.push_back(curve(config(with(kFp8Experts, more), {}), 1));
  for (const char* const recipe : {"tensorwise", "rowwise"}) {
    Fields other = bf16;
    other[1] = "train.fp8=e4m3";
    other.push_back(std::string("train.fp8_recipe=") + recipe);
    curves.push_back(curve(config(other, {}), 1));
  }
  for (const std::vector<double>& narrow : curves) {
    for (size_t i = 0; i < wide.size(); i += 2) EXPECT_NEAR(narrow[i] / wide[i], 1, 0.02) << i;
    EXPECT_NE(narrow[0], wide[0]);
  }
}

/// In the first step an expert's products have scales of the rows that the rank has: with ep those
/// of two data-parallel ranks, with tp those of a part of the weight. From then on now and then a
/// token goes to another expert.
TEST_F(Fp8TrainingTest, TheLayoutOfExpertsChangesLittle) {
  const std::vector<double> expected = curve(config(kFp8Experts, {}), 1);
  const auto expect_near = [&](int64_t world, const Fields& model, const Fields& layout) {
    SCOPED_TRACE(fmt::format("{}", fmt::join(layout, " ")));
    const std::vector<double> found = curve(config(with(kFp8Experts, model), layout), world);
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_NEAR(found[1] / expected[1], 1, 0.005);
    for (size_t i = 0; i < expected.size(); i += 2)
      EXPECT_NEAR(found[i] / expected[i], 1, i == 0 ? 0.002 : 0.02) << i;
  };
  expect_near(2, {}, {"expert_model_parallel_size=2"});
  expect_near(2, {"model.moe_token_dispatcher_type=allgather"}, {"expert_model_parallel_size=2"});
  expect_near(2, {}, {"tensor_model_parallel_size=2"});
  expect_near(4, {},
              {"tensor_model_parallel_size=2", "expert_model_parallel_size=2",
               "expert_tensor_parallel_size=1"});
  expect_near(2,
              {"ddp.use_distributed_optimizer=true",
               "ddp.data_parallel_sharding_strategy=optim_grads_params"},
              {"expert_model_parallel_size=2"});
  expect_close(kFp8Experts, 2, {"pipeline_model_parallel_size=2"}, Sums::order);
  expect_close(kFp8Experts, 2, {}, Sums::order);
}

TEST_F(Fp8TrainingTest, RecomputationGivesTheSameBits) {
  const std::vector<double> kept = curve(config(kFp8, {}), 1);
  EXPECT_EQ(curve(config(with(kFp8, {"model.recompute_granularity=full"}), {}), 1), kept);
  EXPECT_EQ(curve(config(with(kFp8Experts, {"model.recompute_granularity=full"}), {}), 1),
            curve(config(kFp8Experts, {}), 1));
}

TEST_F(Fp8TrainingTest, WhatARunDoesBesideItsStepsChangesNothing) {
  const std::vector<double> expected = curve(config(kFp8, {}), 2);
  for (const char* const more :
       {"train.replay_interval=1", "train.replica_check_interval=1", "train.eval_interval=2"}) {
    std::vector<double> found = curve(config(with(kFp8, {more}), {}), 2);
    if (std::string(more).starts_with("train.eval"))  // without the validations in between
      for (size_t i = 4; i + 1 < found.size(); i += 4) found.erase(found.begin() + i);
    EXPECT_EQ(found, expected) << more;
  }
}

TEST_F(Fp8TrainingTest, AnAuditLeavesNoTrace) {
  const Config of_run = config(kFp8, {});
  std::vector<double> losses[2];
  for (const bool audited : {false, true})
    testing::run_ranks(
        2,
        [&](const ParallelState& state) {
          Trainer trainer(of_run, state);
          for (int step = 0; step < 4; ++step) {
            if (audited) trainer.audit();
            const double loss = trainer.train_step().lm_loss;
            if (state.rank() == 0) losses[audited ? 1 : 0].push_back(loss);
          }
        },
        options_of(of_run));
  EXPECT_EQ(losses[0], losses[1]);
}

/// One message a step for the scales of all layers, over the ranks that share them.
TEST_F(Fp8TrainingTest, AStepSendsOneMessageForTheScales) {
  for (const bool staged : {false, true}) {
    testing::CollectiveLog log;
    const Config of_run = config(kFp8, staged ? Fields{"pipeline_model_parallel_size=2",
                                                       "virtual_pipeline_model_parallel_size=2"}
                                              : Fields{"tensor_model_parallel_size=2"});
    testing::RankThreadOptions options = options_of(of_run);
    options.log = &log;
    testing::run_ranks(
        4,
        [&](const ParallelState& state) {
          Trainer trainer(of_run, state);
          trainer.train_step();
          trainer.train_step();
        },
        options);
    for (int64_t rank = 0; rank < 4; ++rank) {
      int calls = 0;
      for (const auto& call : log.of_rank(rank)) {
        if (call.label != "largest values for fp8 scales") continue;
        ++calls;
        EXPECT_EQ(call.operation, "all_reduce (max)");
        EXPECT_EQ(call.ranks.size(), staged ? 2U : 4U);
        EXPECT_EQ(call.bytes, (staged ? 2 : 1) * 64 * 3 * 4);
      }
      EXPECT_EQ(calls, 2);
    }
  }
}

}  // namespace
}  // namespace lockstep
