// Options of the model and of Muon that layouts must not change: a run on each layout against one
// process.

#include <gtest/gtest.h>

#include "lockstep/tests/training/trainer_layouts.h"

namespace lockstep {
namespace {

using testing::joined;
using testing::Outcome;
using testing::Overrides;
using testing::TrainerLayout;
using testing::TrainerLayoutsTest;

class ModelOptionsTest : public TrainerLayoutsTest {
 protected:
  /// Compares curves and weights, and returns those of one process.
  Outcome expect_same_on(const std::vector<TrainerLayout>& layouts, const Overrides& run) {
    const Overrides all = joined({"model.num_layers=4"}, run);
    const Outcome expected = train({}, all);
    for (const TrainerLayout& layout : layouts) {
      SCOPED_TRACE(layout.text());
      expect_close(train(layout, all), expected, 1e-11, layout.tp);
    }
    return expected;
  }
};

TEST_F(ModelOptionsTest, MuonTakesQueriesKeysAndValuesApartOnEveryLayout) {
  const Overrides muon = {"optimizer.optimizer=muon", "model.num_query_groups=2",
                          "model.add_qkv_bias=true"};
  const std::vector<TrainerLayout> layouts = {{.tp = 2, .dp = 2}, {.tp = 4}, {.pp = 2, .vpp = 2}};
  const Outcome split = expect_same_on(layouts, muon);
  expect_same_on({{.dp = 2}, {.tp = 2, .sp = true, .dp = 2}},
                 joined(muon, {"ddp.use_distributed_optimizer=true"}));
  const Outcome fused = expect_same_on(layouts, joined(muon, {"optimizer.muon_split_qkv=false"}));
  EXPECT_GT(std::abs(split.curve[4] - fused.curve[4]), 1e-4);
}

TEST_F(ModelOptionsTest, TheTrainingLossIsSmoothedAndThatOfValidationIsNot) {
  const Overrides smoothed = {"model.label_smoothing=0.3",
                              "model.make_vocab_size_divisible_by=100"};
  expect_same_on({{.dp = 2}, {.tp = 2}, {.tp = 2, .sp = true, .pp = 2}, {.pp = 2, .vpp = 2}},
                 smoothed);
  const Overrides still = {"optimizer.lr=0", "train.train_iters=2"};
  for (const TrainerLayout& layout : {TrainerLayout{}, TrainerLayout{.tp = 2}, {.pp = 2}}) {
    const Outcome with = train(layout, joined(smoothed, still));
    const Outcome without = train(layout, joined({smoothed[1]}, still));
    ASSERT_EQ(with.curve.size(), 5U);
    EXPECT_DOUBLE_EQ(with.curve[4], without.curve[4]) << "validation";
    for (const size_t i : {0, 2}) EXPECT_GT(std::abs(with.curve[i] - without.curve[i]), 1e-3) << i;
  }
}

TEST_F(ModelOptionsTest, AListOfLayersWithExpertsTrainsOnEveryLayout) {
  // The balancing loss is computed per micro-batch, so micro-batches are the same on all layouts.
  const Overrides experts = {"model.num_experts=4", "model.moe_ffn_hidden_size=8",
                             "model.moe_aux_loss_coeff=0.01", "train.micro_batch_size=1"};
  const Overrides run = joined(experts, {"model.moe_layer_freq=[0, 1, 1, 0]"});
  const Outcome list = expect_same_on({{.dp = 2}, {.pp = 2}, {.pp = 2, .vpp = 2}, {.pp = 4}}, run);
  const Outcome cut = train({.tp = 2, .sp = true, .dp = 2}, joined({"model.num_layers=4"}, run));
  for (size_t i = 0; i < cut.curve.size(); ++i)
    EXPECT_NEAR(cut.curve[i], list.curve[i], 1e-11 * std::abs(list.curve[i])) << i;
  EXPECT_EQ(list.weights.count({"decoder.layers.0.mlp.router.weight", 0}), 0U);
  EXPECT_EQ(list.weights.count({"decoder.layers.1.mlp.router.weight", 0}), 1U);
  EXPECT_EQ(list.weights.count({"decoder.layers.2.mlp.router.weight", 0}), 1U);
  EXPECT_EQ(list.weights.count({"decoder.layers.3.mlp.router.weight", 0}), 0U);
}

TEST_F(ModelOptionsTest, AListAndANumberThatMeanTheSameTrainTheSame) {
  const Overrides experts = {"model.num_experts=4", "model.num_layers=4", "train.train_iters=3"};
  const Outcome number = train({.dp = 2}, joined(experts, {"model.moe_layer_freq=2"}));
  const Outcome list = train({.dp = 2}, joined(experts, {"model.moe_layer_freq=[1, 0, 1, 0]"}));
  EXPECT_EQ(list.curve, number.curve);
}

TEST_F(ModelOptionsTest, RecomputationOfStagesChangesNoBit) {
  for (const TrainerLayout& layout :
       {TrainerLayout{.pp = 2}, {.tp = 2, .pp = 2}, {.pp = 2, .vpp = 2}})
    for (const Overrides& recompute :
         std::vector<Overrides>{{"model.recompute_num_layers=1"},
                                {"model.recompute_method=uniform", "model.recompute_num_layers=2"},
                                {"model.recompute_method=uniform", "model.hidden_dropout=0.1"}}) {
      SCOPED_TRACE(layout.text() + " " + recompute[0] + " " + recompute.back());
      Overrides plain = {"model.num_layers=4", "train.train_iters=3"};
      if (recompute.back().find("dropout") != std::string::npos) plain.push_back(recompute.back());
      const Outcome found =
          train(layout, joined(joined(plain, {"model.recompute_granularity=full"}), recompute));
      EXPECT_EQ(found.curve, train(layout, plain).curve);
    }
}

}  // namespace
}  // namespace lockstep
