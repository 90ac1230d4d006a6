#include "lockstep/optimizer/param_scheduler.h"

#include <gtest/gtest.h>

#include <utility>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

// The golden values come from Megatron Core's own OptimizerParamScheduler.
namespace lockstep {
namespace {

struct Point {
  int64_t samples;
  double value;
};

OptimizerConfig golden(LrDecayStyle style) {
  OptimizerConfig config;
  config.lr = 1e-3;
  config.min_lr = 1e-5;
  config.lr_warmup_iters = 100;
  config.lr_decay_iters = 1000;
  config.lr_decay_style = style;
  return config;
}

void expect_rates(const OptimizerConfig& config, const std::vector<Point>& points) {
  const OptimizerParamScheduler scheduler(config, 1000, 1);
  for (const Point& point : points)
    EXPECT_NEAR(scheduler.learning_rate(point.samples), point.value, 1e-8 * point.value)
        << to_string(config.lr_decay_style) << " after " << point.samples;
}

TEST(ParamScheduler, G94LinearAndCosine) {
  expect_rates(golden(LrDecayStyle::linear), {{0, 0},
                                              {50, 5e-4},
                                              {100, 1e-3},
                                              {400, 6.7e-4},
                                              {550, 5.05e-4},
                                              {800, 2.3e-4},
                                              {900, 1.2e-4},
                                              {1000, 1e-5},
                                              {1001, 1e-5}});
  expect_rates(golden(LrDecayStyle::cosine), {{0, 0},
                                              {50, 5e-4},
                                              {100, 1e-3},
                                              {400, 7.525e-4},
                                              {550, 5.05e-4},
                                              {800, 1.25808001e-4},
                                              {900, 3.98521527e-5},
                                              {1000, 1e-5},
                                              {1001, 1e-5}});
}

TEST(ParamScheduler, G95InverseSquareRootDropsToTheMinimumAfterDecay) {
  expect_rates(golden(LrDecayStyle::inverse_square_root), {{0, 0},
                                                           {50, 5e-4},
                                                           {100, 1e-3},
                                                           {400, 5e-4},
                                                           {550, 4.26401433e-4},
                                                           {800, 3.53553391e-4},
                                                           {900, 3.33333333e-4},
                                                           {1000, 3.16227766e-4},
                                                           {1001, 1e-5}});
}

// Megatron Core: max(min_lr, max_lr * sqrt(max(warmup, 1)) / sqrt(max(steps, 1))).
TEST(ParamScheduler, InverseSquareRootStaysAboveTheMinimumAndNeedsNoWarmup) {
  OptimizerConfig config = golden(LrDecayStyle::inverse_square_root);
  config.min_lr = 4e-4;
  expect_rates(config, {{400, 5e-4}, {900, 4e-4}});
  config.min_lr = 1e-5;
  config.lr_warmup_iters = 0;
  expect_rates(config, {{0, 1e-3}, {1, 1e-3}, {4, 5e-4}, {100, 1e-4}});
}

TEST(ParamScheduler, G96WarmupStableDecay) {
  OptimizerConfig config = golden(LrDecayStyle::WSD);
  config.lr_wsd_decay_iters = 200;
  const std::vector<std::pair<WsdDecayStyle, double>> at_900 = {
      {WsdDecayStyle::exponential, 4.20071427e-4},
      {WsdDecayStyle::linear, 5.05e-4},
      {WsdDecayStyle::cosine, 5.05e-4},
      {WsdDecayStyle::minus_sqrt, 2.99964287e-4}};
  for (const auto& [style, value] : at_900) {
    config.lr_wsd_decay_style = style;
    expect_rates(config, {{50, 5e-4}, {799, 1e-3}, {800, 1e-3}, {900, value}, {1000, 1e-5}});
  }
}

TEST(ParamScheduler, G96ConstantStaysAtTheMaximum) {
  expect_rates(golden(LrDecayStyle::constant),
               {{50, 5e-4}, {100, 1e-3}, {1000, 1e-3}, {5000, 1e-3}});
}

TEST(ParamScheduler, G97WeightDecay) {
  OptimizerConfig config = golden(LrDecayStyle::constant);
  config.start_weight_decay = 0;
  config.end_weight_decay = 0.1;
  const auto expect = [&](WeightDecayIncrStyle style, const std::vector<Point>& points) {
    config.weight_decay_incr_style = style;
    const OptimizerParamScheduler scheduler(config, 1000, 1);
    for (const Point& point : points)
      EXPECT_NEAR(scheduler.weight_decay(point.samples), point.value, 1e-9) << point.samples;
  };
  expect(WeightDecayIncrStyle::linear,
         {{100, .01}, {250, .025}, {500, .05}, {1000, .1}, {1200, .1}});
  expect(WeightDecayIncrStyle::cosine,
         {{100, .002447174}, {250, .014644661}, {500, .05}, {1000, .1}, {1200, .1}});
  expect(WeightDecayIncrStyle::constant, {{100, .1}, {1200, .1}});
}

TEST(ParamScheduler, G98WarmupStartsAtItsInitialRate) {
  OptimizerConfig config = golden(LrDecayStyle::linear);
  config.lr = 0.1;
  config.min_lr = 0.001;
  config.lr_warmup_init = 0.01;
  expect_rates(config, {{0, .01}, {50, .055}, {500, .056}, {1001, .001}});
  config.lr_decay_style = LrDecayStyle::cosine;
  expect_rates(config, {{500, .0590955848}});
}

TEST(ParamScheduler, OtherRatesFollowTheSameCurveFromTheSameStart) {
  OptimizerConfig config = golden(LrDecayStyle::linear);
  config.lr_warmup_init = 1e-6;
  config.lr_wsd_decay_iters = 200;
  const auto expect = [&](LrDecayStyle style, const std::vector<Point>& fast,
                          const std::vector<Point>& slow) {
    config.lr_decay_style = style;
    const OptimizerParamScheduler scheduler(config, 1000, 1);
    for (const auto& [n, value] : fast)
      EXPECT_NEAR(scheduler.learning_rate(n, 2e-2, 4e-4), value, 1e-10 * value) << n;
    for (const auto& [n, value] : slow)
      EXPECT_NEAR(scheduler.learning_rate(n, 5e-4, 1e-5), value, 1e-10 * value) << n;
  };
  expect(LrDecayStyle::linear,
         {{50, .0100005}, {400, .0134666666667}, {900, .00257777777778}, {1001, 4e-4}},
         {{50, 2.505e-4}, {400, 3.36666666667e-4}, {900, 6.44444444444e-5}, {1001, 1e-5}});
  expect(LrDecayStyle::cosine, {{50, .0100005}, {400, .0151}, {900, 9.91012316298e-4}},
         {{400, 3.775e-4}, {900, 2.47753079075e-5}});
  expect(LrDecayStyle::inverse_square_root, {{400, .01}, {900, .00666666666667}, {1001, 4e-4}},
         {{400, 2.5e-4}, {900, 1.66666666667e-4}});
  expect(LrDecayStyle::WSD, {{400, .02}, {900, .00851858582251}, {1001, 4e-4}},
         {{900, 2.12964645563e-4}});
  expect(LrDecayStyle::constant, {{50, .0100005}, {1001, .02}}, {{1001, 5e-4}});
}

TEST(ParamScheduler, IterationsCountTheGlobalBatch) {
  const OptimizerParamScheduler scheduler(golden(LrDecayStyle::linear), 1000, 32);
  EXPECT_DOUBLE_EQ(scheduler.learning_rate(50 * 32), 5e-4);
  EXPECT_DOUBLE_EQ(scheduler.learning_rate(550 * 32), 5.05e-4);
}

// Megatron Core: wd_incr_steps = train_samples, lr_decay_steps = train_samples.
TEST(ParamScheduler, BatchesThatChangeSizeEndTheSchedulesWithTheRun) {
  OptimizerConfig config;
  config.lr = 1;
  config.start_weight_decay = 0;
  config.end_weight_decay = 0.1;
  config.weight_decay_incr_style = WeightDecayIncrStyle::linear;
  // 12 iterations of 2 to 8 sequences, in place of 96 sequences.
  const OptimizerParamScheduler scheduler(config, 12, 8, 62);
  for (const auto& [samples, share] :
       std::vector<std::pair<int64_t, double>>{{0, 0}, {31, 0.5}, {54, 54.0 / 62}, {62, 1}}) {
    EXPECT_NEAR(scheduler.learning_rate(samples), 1 - share, 1e-15) << samples;
    EXPECT_NEAR(scheduler.weight_decay(samples), 0.1 * share, 1e-15) << samples;
  }
  EXPECT_EQ(scheduler.learning_rate(63), 0);
  config.lr_warmup_iters = 10;  // 80 samples; the decay still takes a batch
  EXPECT_NEAR(OptimizerParamScheduler(config, 12, 8, 62).learning_rate(40), 0.5, 1e-15);
  EXPECT_NEAR(OptimizerParamScheduler(config, 12, 8, 62).learning_rate(84), 0.5, 1e-15);
  config.lr_warmup_iters = 0;
  config.lr_decay_iters = 10;  // which counts batches of 8
  EXPECT_NEAR(OptimizerParamScheduler(config, 12, 8, 62).learning_rate(40), 0.5, 1e-15);
  EXPECT_NEAR(OptimizerParamScheduler(config, 12, 8, 62).weight_decay(31), 0.05, 1e-15);
}

TEST(ParamScheduler, BatchesOfOneSizeGiveTheSameBitsHoweverTheRunIsCounted) {
  OptimizerConfig config = golden(LrDecayStyle::cosine);
  config.end_weight_decay = 0.1;
  config.weight_decay_incr_style = WeightDecayIncrStyle::cosine;
  const OptimizerParamScheduler iterations(config, 1000, 24);
  config.lr_decay_iters = {};
  const OptimizerParamScheduler samples(config, 1000, 24, 24000);
  for (int64_t n = 0; n < 25000; n += 24) {
    EXPECT_EQ(samples.learning_rate(n), iterations.learning_rate(n)) << n;
    EXPECT_EQ(samples.weight_decay(n), iterations.weight_decay(n)) << n;
  }
}

TEST(ParamScheduler, AFinalDecayFitsIntoTheRun) {
  OptimizerConfig config;
  config.lr = 1;
  config.lr_decay_style = LrDecayStyle::WSD;
  config.lr_wsd_decay_style = WsdDecayStyle::linear;
  config.lr_wsd_decay_iters = 7;
  const OptimizerParamScheduler scheduler(config, 12, 8, 62);
  for (const auto& [samples, rate] :
       std::vector<std::pair<int64_t, double>>{{6, 1}, {34, 0.5}, {62, 0}})
    EXPECT_NEAR(scheduler.learning_rate(samples), rate, 1e-15) << samples;
  config.lr_wsd_decay_iters = 8;
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      [&] { OptimizerParamScheduler(config, 12, 8, 62); },
      "optimizer.lr_wsd_decay_iters: found 8, which are 64 samples in batches of 8, allowed: at "
      "most 62 samples, because the decay ends with the run; or set optimizer.lr_decay_iters"));
}

TEST(ParamScheduler, RefusesWhatDoesNotFit) {
  OptimizerConfig config = golden(LrDecayStyle::WSD);
  const auto make = [&](int64_t batch) { OptimizerParamScheduler(config, 1000, batch); };
  EXPECT_TRUE(testing::throws_with<ConfigError>([&] { make(1); }, "optimizer.lr_wsd_decay_iters"));
  config = golden(LrDecayStyle::linear);
  config.lr_warmup_iters = 1000;
  EXPECT_TRUE(testing::throws_with<ConfigError>([&] { make(1); }, "found 1000, allowed: > "));
  EXPECT_TRUE(testing::throws_with<ConfigError>([&] { make(0); }, "train.global_batch_size"));
}

}  // namespace
}  // namespace lockstep
