// The sources of the scales of 8-bit floats, and the communication for them.

#include <limits>

#include "lockstep/tests/models/fp8_operands.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

TEST(Fp8Scales, DelayedScalesComeFromTheLargestValuesOfTheStepsBefore) {
  for (const auto algorithm : {Fp8AmaxAlgorithm::max, Fp8AmaxAlgorithm::most_recent})
    for (const int64_t margin : {0, 2}) {
      Fp8Options delayed = options(Fp8Recipe::delayed);
      delayed.amax_compute_algo = algorithm;
      delayed.margin = margin;
      const auto scaling = scaling_of(delayed);
      const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
      std::vector<double> largest;  // of x, by step
      const double shrink = std::exp2(margin);
      for (const double size : {4.0, 1.0, 0.25, 2.0, 0.5, 0.5}) {
        at::Tensor last;
        // Two micro-batches; the first has larger values.
        for (const double part : {1.0, 0.5}) {
          Use use(noise({8, kIn}, 1, size * part), noise({kOut, kIn}, 2, 0.02),
                  noise({8, kOut}, 3, 1e-6));
          use.run(layer);
          const at::Tensor x = use.x.detach(), w = use.w.detach();
          double from = x.abs().max().item<double>();
          if (part == 1.0) last = x;
          if (!largest.empty()) {
            from = largest.back();
            if (algorithm == Fp8AmaxAlgorithm::max)
              for (size_t i = largest.size() > 3 ? largest.size() - 3 : 0; i < largest.size(); ++i)
                from = std::max(from, largest[i]);
          }
          const Operands exact = {rounded(x, kE4m3 / from / shrink, kE4m3),
                                  rounded(w, scale_of(w, kE4m3) / shrink, kE4m3), use.g};
          expect_near(use.output.detach(), exact.output(), kBf16);
        }
        largest.push_back(last.abs().max().item<double>());
        Fp8Scaling::end_step({scaling}, one_process());
      }
    }
}

TEST(Fp8Scales, NoScaleFollowsFromNothingOrFromWhatIsNotFinite) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
  const auto scales = [&] { return scaling->state().front().scales.clone(); };
  EXPECT_TRUE(scales().eq(0).all().item<bool>());
  Fp8Scaling::end_step({scaling}, one_process());
  EXPECT_TRUE(scales().eq(1).all().item<bool>());
  const auto run = [&](double value) {
    Use use(noise({8, kIn}, 1), noise({kOut, kIn}, 2), noise({8, kOut}, 3));
    use.x.mutable_data_ptr<at::BFloat16>()[5] = static_cast<float>(value);
    use.run(layer);
    Fp8Scaling::end_step({scaling}, one_process());
    return use.output;
  };
  run(1);
  const at::Tensor before = scales();
  EXPECT_TRUE(before.gt(1).all().item<bool>());
  const at::Tensor output = run(std::numeric_limits<double>::quiet_NaN());
  EXPECT_TRUE(output.isnan().any().item<bool>());
  EXPECT_TRUE(run(std::numeric_limits<double>::infinity()).isnan().any().item<bool>());
  EXPECT_TRUE(at::equal(scales()[1], before[1]));
  // The history of three steps still has the first one.
  EXPECT_TRUE(at::equal(scales(), before));
  run(1);
  EXPECT_TRUE(scales().gt(1).all().item<bool>());
}

/// The largest values are taken over all ranks, with one message for all layers.
TEST(Fp8Scales, RanksHaveTheSameScales) {
  CollectiveLog log;
  std::vector<at::Tensor> scales(4);
  RankThreadOptions threads;
  threads.sizes.tensor = 2;
  threads.log = &log;
  run_ranks(
      4,
      [&](const ParallelState& state) {
        const auto rank = static_cast<uint64_t>(state.rank());
        std::vector<std::shared_ptr<Fp8Scaling>> models;
        for (int i = 0; i < 2; ++i) {
          models.push_back(scaling_of(options(Fp8Recipe::delayed)));
          const auto layer = models.back()->add_layer("weight", at::empty({kOut, kIn}));
          Use use(noise({8, kIn}, rank), noise({kOut, kIn}, 9 + rank), noise({8, kOut}, 5 + rank));
          use.run(layer);
        }
        Fp8Scaling::end_step(models, state.group(GroupKind::tp_dp_cp));
        scales[rank] = models[1]->state().front().scales.clone();
      },
      threads);
  at::Tensor largest = at::zeros({3}, at::kDouble);
  for (uint64_t rank = 0; rank < 4; ++rank) {
    EXPECT_TRUE(at::equal(scales[rank], scales[0])) << rank;
    const at::Tensor operands[] = {noise({8, kIn}, rank), noise({kOut, kIn}, 9 + rank),
                                   noise({8, kOut}, 5 + rank)};
    for (int i = 0; i < 3; ++i)
      largest[i] = at::maximum(largest[i], operands[i].abs().max().to(at::kDouble));
    const auto calls = log.of_rank(static_cast<int64_t>(rank));
    ASSERT_EQ(calls.size(), 1U);
    EXPECT_EQ(calls[0].operation, "all_reduce (max)");
    EXPECT_EQ(calls[0].ranks, (std::vector<int64_t>{0, 1, 2, 3}));
    EXPECT_EQ(calls[0].bytes, 2 * 64 * 3 * 4);
  }
  const at::Tensor expected = at::tensor({kE4m3, kE4m3, kE5m2}, at::kDouble) / largest;
  expect_near(scales[0], expected, 1e-6);
}

TEST(Fp8Scales, OtherRecipesSendNothingAndKeepNothing) {
  for (const Fp8Recipe recipe : {Fp8Recipe::tensorwise, Fp8Recipe::rowwise}) {
    const auto scaling = scaling_of(options(recipe, Fp8Format::e4m3));
    scaling->add_layer("weight", at::empty({kOut, kIn}));
    EXPECT_TRUE(scaling->state().empty());
    CollectiveLog log;
    run_ranks(2,
              [&](const ParallelState& state) { Fp8Scaling::end_step({scaling}, state.world()); },
              {.log = &log});
    EXPECT_TRUE(log.of_rank(0).empty());
  }
}

TEST(Fp8Scales, OnlyTrainingCountsForTheScales) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
  const auto run = [&](double size) {
    Use use(noise({8, kIn}, 1, size), noise({kOut, kIn}, 2), noise({8, kOut}, 3));
    use.run(layer);
  };
  run(1);
  Fp8Scaling::end_step({scaling}, one_process());
  const at::Tensor first = scaling->state().front().scales.clone();
  run(100);
  scaling->abandon_step();
  {
    const at::NoGradGuard no_grad;
    parallel_linear(noise({8, kIn}, 1, 100), noise({kOut, kIn}, 2, 100), {},
                    {.group = one_process(), .fp8 = layer, .label = "layer"});
  }
  run(0.5);
  Fp8Scaling::end_step({scaling}, one_process());
  EXPECT_TRUE(at::equal(scaling->state().front().scales, first));
  EXPECT_EQ(scaling->state().front().amax_history[0][0].item<double>(),
            noise({8, kIn}, 1, 0.5).abs().max().item<double>());
}

/// The first step counts in any case, because the second needs scales.
TEST(Fp8Scales, ASkippedStepLeavesNothingInTheHistory) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
  const auto run = [&](double size, bool applied) {
    Use use(noise({8, kIn}, 1, size), noise({kOut, kIn}, 2), noise({8, kOut}, 3));
    use.run(layer);
    Fp8Scaling::end_step({scaling}, one_process(), at::full({}, applied, at::kBool));
    return std::pair(scaling->state().front().amax_history.clone(),
                     scaling->state().front().scales.clone());
  };
  const double largest = noise({8, kIn}, 1).abs().max().item<double>();
  const auto first = run(1, false);
  EXPECT_EQ(first.first[0][0].item<double>(), largest);
  const auto skipped = run(100, false);
  EXPECT_TRUE(at::equal(skipped.first, first.first));
  EXPECT_TRUE(at::equal(skipped.second, first.second));
  const auto applied = run(0.5, true);
  EXPECT_EQ(applied.first[0][0].item<double>(), largest / 2);
  EXPECT_EQ(applied.first[0][1].item<double>(), largest);
}

TEST(Fp8Scales, MoreLayersThanABlockHasKeepTheirOwnScales) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  std::vector<std::shared_ptr<const Fp8Layer>> layers;
  for (int i = 0; i < 130; ++i) layers.push_back(scaling->add_layer("w", at::empty({16, 16})));
  for (size_t i = 0; i < layers.size(); ++i) {
    Use use(at::full({16, 16}, static_cast<double>(i + 1), at::kBFloat16), noise({16, 16}, 1),
            noise({16, 16}, 2));
    use.run(layers[i]);
  }
  Fp8Scaling::end_step({scaling}, one_process());
  const auto state = scaling->state();
  ASSERT_EQ(state.size(), layers.size());
  for (size_t i = 0; i < layers.size(); ++i)
    EXPECT_EQ(state[i].amax_history[0][0].item<double>(), static_cast<double>(i + 1));
}

}  // namespace
}  // namespace lockstep
