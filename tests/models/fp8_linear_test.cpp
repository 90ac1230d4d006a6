// Linear layers in 8-bit floats: products and gradients compared with fp64, on operands that the
// test rounds.

#include "lockstep/core/check.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/recompute.h"
#include "lockstep/tests/models/fp8_operands.h"
#include "lockstep/tests/support/awaited_gradients.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

TEST(Fp8Linear, ProductsAreThoseOfTheRoundedOperands) {
  for (const Fp8Format format : {Fp8Format::hybrid, Fp8Format::e4m3})
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::tensorwise}) {
      const auto scaling = scaling_of(options(recipe, format));
      const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
      Use use(noise({6, 2, kIn}, 1), noise({kOut, kIn}, 2, 0.02), noise({6, 2, kOut}, 3, 1e-6));
      use.bias = noise({kOut}, 4).requires_grad_(true);
      use.run(layer);
      const at::Tensor x = use.x.detach().flatten(0, 1), g = use.g.flatten(0, 1);
      const double most = format == Fp8Format::hybrid ? kE5m2 : kE4m3;
      const Operands exact = {rounded(x, scale_of(x, kE4m3), kE4m3),
                              rounded(use.w.detach(), scale_of(use.w.detach(), kE4m3), kE4m3),
                              rounded(g, scale_of(g, most), most)};
      expect_near(use.output.detach().flatten(0, 1), exact.output() + use.bias.detach(), kBf16);
      expect_near(use.x.grad().flatten(0, 1), exact.of_input(), kBf16);
      expect_near(use.w.grad(), exact.of_weight(), kBf16);
      expect_near(use.bias.grad(), g.to(at::kDouble).sum(0), 0.02);
    }
}

TEST(Fp8Linear, WithScalesOfRowsEachProductHasThoseThatItMultiplies) {
  const auto scaling = scaling_of(options(Fp8Recipe::rowwise, Fp8Format::e4m3));
  const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
  // Very different sizes of the rows and columns.
  const at::Tensor sizes = at::exp2(at::arange(16) - 8).view({16, 1}).to(at::kBFloat16);
  Use use(noise({16, kIn}, 1) * sizes, noise({kOut, kIn}, 2, 0.02),
          noise({16, kOut}, 3, 1e-6) * sizes.flip(0));
  use.run(layer);
  const at::Tensor x = use.x.detach(), w = use.w.detach();
  const auto by_columns = [](const at::Tensor& z) {
    return rounded_rows(z.t().contiguous(), kE4m3).t();
  };
  expect_near(use.output.detach(), rounded_rows(x, kE4m3).mm(rounded_rows(w, kE4m3).t()), kBf16);
  expect_near(use.x.grad(), rounded_rows(use.g, kE4m3).mm(by_columns(w)), kBf16);
  expect_near(use.w.grad(), by_columns(use.g).t().mm(by_columns(x)), kBf16);
}

TEST(Fp8Linear, RecomputationGivesTheSameBits) {
  std::vector<at::Tensor> found[2];
  for (const bool again : {false, true}) {
    const auto scaling = scaling_of(options(Fp8Recipe::delayed));
    const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
    for (int step = 0; step < 3; ++step) {
      const at::Tensor x = noise({8, kIn}, 1 + step).requires_grad_(true);
      const at::Tensor w = noise({kOut, kIn}, 7).requires_grad_(true);
      const auto function = [&](const std::vector<at::Tensor>& inputs) {
        return parallel_linear(inputs[0], w, {},
                               {.group = one_process(), .fp8 = layer, .label = "layer"});
      };
      const at::Tensor y = again ? recompute(function, {x}) : function({x});
      y.backward(noise({8, kOut}, 3 + step));
      Fp8Scaling::end_step({scaling}, one_process());
      for (const at::Tensor& t :
           {y.detach(), x.grad(), w.grad(), scaling->state().front().scales.clone()})
        found[again ? 1 : 0].push_back(t);
    }
  }
  for (size_t i = 0; i < found[0].size(); ++i)
    EXPECT_TRUE(at::equal(found[0][i], found[1][i])) << i;
}

TEST(Fp8Linear, ABufferInFp32GetsTheGradientWithoutRoundingItFirst) {
  const auto scaling = scaling_of(options(Fp8Recipe::tensorwise));
  const auto layer = scaling->add_layer("weight", at::empty({kOut, kIn}));
  const at::Tensor w = noise({kOut, kIn}, 2).requires_grad_(true);
  w.mutable_grad() = at::zeros({kOut, kIn});
  int calls = 0;
  testing::count_gradients(w, calls);
  at::Tensor exact = at::zeros({kOut, kIn}, at::kDouble);
  for (int step = 0; step < 3; ++step) {
    const at::Tensor x = noise({16, kIn}, 3 + step).requires_grad_(true);
    const at::Tensor g = noise({16, kOut}, 8 + step);
    parallel_linear(x, w, {}, {.group = one_process(), .fp8 = layer, .label = "layer"}).backward(g);
    exact += rounded(g, scale_of(g, kE5m2), kE5m2)
                 .t()
                 .mm(rounded(x.detach(), scale_of(x.detach(), kE4m3), kE4m3));
  }
  EXPECT_EQ(calls, 3);
  EXPECT_EQ(w.grad().scalar_type(), at::kFloat);
  expect_near(w.grad(), exact, 1e-6);
}

/// Layers that are cut over two ranks, compared with the same layers on one.
TEST(Fp8Linear, LayersThatAreCutHaveTheResultsOfWholeOnes) {
  for (const bool sequence : {false, true}) {
    std::vector<at::Tensor> outputs[2], scales[2];
    for (const int64_t ranks : {1, 2}) {
      RankThreadOptions threads;
      threads.sizes.tensor = ranks;
      run_ranks(
          ranks,
          [&](const ParallelState& state) {
            const auto scaling =
                scaling_of(options(Fp8Recipe::delayed), state.group(GroupKind::tp_cp));
            ParallelContext context{.state = state,
                                    .options = at::TensorOptions(at::kFloat),
                                    .sequence_parallel = sequence && ranks > 1,
                                    .name = "mlp.",
                                    .fp8 = scaling};
            const ColumnParallelLinear up(context.child("up"), kIn, {64}, false, 0.3);
            const RowParallelLinear down(context.child("down"), 64, kIn, false, 0.3);
            for (int step = 0; step < 3; ++step) {
              at::Tensor x = noise({8, 2, kIn}, 20 + step).to(at::kFloat);
              if (context.sequence_parallel) x = x.chunk(2, 0)[state.rank()].contiguous();
              x.requires_grad_(true);
              const at::Tensor y = down.forward(at::relu(up.forward(x)));
              y.backward(noise({8, 2, kIn}, 30 + step)
                             .to(at::kFloat)
                             .chunk(context.sequence_parallel ? 2 : 1,
                                    0)[context.sequence_parallel ? state.rank() : 0]);
              Fp8Scaling::end_step({scaling}, state.group(GroupKind::tp_dp_cp));
              if (state.rank() != 0) continue;
              const int64_t rows = sequence ? 4 : 8;
              outputs[ranks - 1].push_back(y.detach().narrow(0, 0, rows).to(at::kDouble));
              outputs[ranks - 1].push_back(x.grad().narrow(0, 0, rows).to(at::kDouble));
            }
            if (state.rank() != 0) return;
            for (const auto& layer : scaling->state()) {
              EXPECT_TRUE(layer.parameter == "mlp.up.weight" ||
                          layer.parameter == "mlp.down.weight");
              scales[ranks - 1].push_back(layer.scales.clone());
            }
          },
          threads);
    }
    for (size_t i = 0; i < outputs[0].size(); ++i) expect_near(outputs[1][i], outputs[0][i], 1e-5);
    ASSERT_EQ(scales[0].size(), 2U);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_EQ(scales[0][i][1].item<float>(), scales[1][i][1].item<float>());
      EXPECT_LT((scales[0][i] / scales[1][i] - 1).abs().max().item<double>(), 0.02);
    }
  }
}

TEST(Fp8Linear, RefusesSizesThatTheProductDoesNotTake) {
  Fp8Scaling scaling(options(Fp8Recipe::delayed), c10::kCPU, one_process());
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        scaling.add_layer("decoder.layers.0.mlp.linear_fc1.weight", at::empty({2, 20, 32}));
      },
      "train.fp8: found hybrid, but decoder.layers.0.mlp.linear_fc1.weight is 40 x 32 on a rank of "
      "tp; allowed with it: multiples of 16"));
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        scaling.add_layer("w", at::empty({32, 24}));
      },
      "32 x 24"));
  scaling.add_layer("w", at::empty({2, 8, 16}));
}

}  // namespace
}  // namespace lockstep
