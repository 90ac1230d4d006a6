// Layers on fused kernels: gradients compared with central differences, and refusals.

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "lockstep/core/error.h"
#include "lockstep/models/activation.h"
#include "lockstep/models/dropout.h"
#include "lockstep/models/normalization.h"
#include "lockstep/models/rotary_embedding.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using Leaves = std::vector<at::Tensor>;

at::Tensor wavy(at::IntArrayRef shape, double seed) {
  return at::sin(at::arange(c10::multiply_integers(shape), at::kDouble) * 0.7 + seed).view(shape);
}

/// Compares the gradients of loss() over `leaves` with central differences.
void expect_slopes(const Leaves& leaves, const std::function<at::Tensor()>& loss) {
  constexpr double kStep = 1e-5;
  const Leaves gradients = torch::autograd::grad({loss()}, leaves);
  const at::NoGradGuard no_grad;
  for (size_t k = 0; k < leaves.size(); ++k) {
    const at::Tensor flat = leaves[k].detach().view({-1}), found = gradients[k].reshape({-1});
    for (int64_t i = 0; i < flat.numel(); ++i) {
      const double before = flat[i].item<double>();
      const auto loss_at = [&](double value) {
        flat[i].fill_(value);
        return loss().item<double>();
      };
      const double slope = (loss_at(before + kStep) - loss_at(before - kStep)) / (2 * kStep);
      flat[i].fill_(before);
      EXPECT_NEAR(found[i].item<double>(), slope, 1e-7 * (1 + std::abs(slope)))
          << "input " << k << ", element " << i;
    }
  }
}

at::Tensor weighted_sum(const Leaves& outputs) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < outputs.size(); ++i)
    sum = sum + (outputs[i] * wavy(outputs[i].sizes(), static_cast<double>(i) + 0.5)).sum();
  return sum;
}

Norm norm_of(int64_t width, Normalization kind) {
  Norm norm(ParallelContext{.options = at::kDouble, .name = "here."}, width, kind, 1e-5);
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : norm.parameters()) parameter.add_(wavy({width}, 3) * 0.5);
  return norm;
}

Leaves and_parameters(Leaves leaves, const Norm& norm) {
  for (const at::Tensor& parameter : norm.parameters()) leaves.push_back(parameter);
  return leaves;
}

TEST(FusedNorm, GradientsEqualCentralDifferences) {
  for (const auto kind : {Normalization::RMSNorm, Normalization::LayerNorm}) {
    const Norm norm = norm_of(5, kind);
    const at::Tensor x = wavy({3, 2, 5}, 0).requires_grad_(true);
    const at::Tensor residual = wavy({3, 2, 5}, 1).requires_grad_(true);
    expect_slopes(and_parameters({x, residual}, norm), [&] {
      const auto [sum, normalized] = norm.of_sum(x, residual);
      return weighted_sum({sum, normalized});
    });
    expect_slopes(and_parameters({x}, norm), [&] {
      const auto [same, normalized] = norm.beside(x);
      return weighted_sum({same, normalized});
    });
    expect_slopes(and_parameters({x}, norm), [&] { return weighted_sum({norm.forward(x)}); });
    // One of the outputs is unused.
    expect_slopes({x, residual}, [&] { return weighted_sum({norm.of_sum(x, residual).residual}); });
    expect_slopes({x, residual},
                  [&] { return weighted_sum({norm.of_sum(x, residual).normalized}); });
  }
}

TEST(FusedNorm, ASumIsTheNormOfTheSum) {
  for (const auto kind : {Normalization::RMSNorm, Normalization::LayerNorm}) {
    const Norm norm = norm_of(7, kind);
    const at::Tensor x = wavy({4, 7}, 0), residual = wavy({4, 7}, 1);
    const auto [sum, normalized] = norm.of_sum(x, residual);
    EXPECT_TRUE(at::equal(sum, x + residual));
    EXPECT_TRUE(at::equal(normalized, norm.forward(x + residual)));
    EXPECT_TRUE(at::equal(norm.beside(x).residual, x));
  }
}

TEST(FusedNorm, RefusesAResidualOfAnotherShape) {
  const Norm norm = norm_of(4, Normalization::RMSNorm);
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] {
        norm.of_sum(wavy({2, 4}, 0), wavy({4}, 0));
      },
      "here: found a residual [4] of Double, allowed: [2, 4] of Double, as of the input"));
}

TEST(FusedNorm, FrozenWeightsGetNoGradient) {
  const Norm norm = norm_of(4, Normalization::LayerNorm);
  for (const at::Tensor& parameter : norm.parameters()) parameter.requires_grad_(false);
  const at::Tensor x = wavy({2, 4}, 0).requires_grad_(true);
  norm.forward(x).sum().backward();
  EXPECT_TRUE(x.grad().defined());
  for (const at::Tensor& parameter : norm.parameters()) EXPECT_FALSE(parameter.grad().defined());
}

TEST(FusedActivation, GradientsEqualCentralDifferences) {
  for (const auto activation : {Activation::swiglu, Activation::gelu, Activation::gelu_tanh}) {
    const at::Tensor inner = (wavy({3, 2, 6}, 0.2) * 3).requires_grad_(true);
    expect_slopes({inner}, [&] { return weighted_sum({activate(activation, inner)}); });
  }
}

RotaryEmbedding rotary_of(double percent) {
  TransformerConfig config;
  config.kv_channels = 8;
  config.seq_length = 6;
  config.rotary_percent = percent;
  return RotaryEmbedding(LayerContext{.config = config, .options = at::kDouble});
}

TEST(FusedRotary, GradientsEqualCentralDifferences) {
  for (const double percent : {1.0, 0.5})
    for (const kernels::QueryRange& queries : {kernels::QueryRange{0, 3}, {1, 1}}) {
      const RotaryEmbedding rotary = rotary_of(percent);
      const at::Tensor packed = wavy({3, 2, 1, 5, 8}, 0.2).requires_grad_(true);
      for (const at::Tensor& positions : {at::Tensor(), at::tensor({5, 0, 2}, at::kLong)})
        expect_slopes({packed}, [&] {
          const auto [query, key, value] = rotary.heads_of(packed, queries, positions);
          return weighted_sum({query, key, value});
        });
    }
}

Dropout dropout_of(double share) { return {LayerContext{.options = at::kDouble}, share}; }

TEST(FusedDropout, GradientsEqualCentralDifferences) {
  const Dropout dropout = dropout_of(0.4);
  const TokenPositions tokens = {.positions = at::tensor({5, 0, 2}, at::kLong), .first_sample = 3};
  const at::Tensor x = wavy({3, 2, 6}, 0.2).requires_grad_(true);
  const at::Tensor residual = wavy({3, 2, 6}, 0.9).requires_grad_(true);
  const at::Tensor weights = wavy({3, 2, 4, 5}, 0.2).requires_grad_(true);
  expect_slopes({x, residual},
                [&] { return weighted_sum({dropout.add(x, residual, tokens, true)}); });
  expect_slopes({x}, [&] { return weighted_sum({dropout.apply_to_channels(x, tokens, 3, true)}); });
  const TokenPositions four = {.positions = at::tensor({5, 0, 2, 9}, at::kLong)};
  expect_slopes({weights},
                [&] { return weighted_sum({dropout.apply_to_attention(weights, four, 1, true)}); });
}

TEST(FusedDropout, AddsWhatApplyGives) {
  const at::Tensor x = wavy({3, 2, 6}, 0.2), residual = wavy({3, 2, 6}, 0.9);
  for (const double share : {0.0, 0.4})
    for (const bool training : {false, true}) {
      const Dropout dropout = dropout_of(share);
      EXPECT_TRUE(at::equal(dropout.add(x, residual, {}, training),
                            residual + dropout.apply(x, {}, training)));
    }
}

TEST(FusedDropout, TakesPartsOfRows) {
  const at::Tensor x = wavy({3, 2, 14}, 0.2);
  const Dropout dropout = dropout_of(0.4);
  const at::Tensor whole = dropout.apply(x, {}, true);
  EXPECT_TRUE(
      at::equal(dropout.apply_to_channels(x.narrow(2, 5, 7), {}, 5, true), whole.narrow(2, 5, 7)));
}

TEST(FusedDropout, HasSecondDerivativesAndKeepsOnlyItsResult) {
  const Dropout dropout = dropout_of(0.4);
  const at::Tensor x = wavy({64, 2, 32}, 0.2).requires_grad_(true);
  const testing::MemoryCounter counter;
  const at::Tensor y = dropout.apply(x, {}, true);
  EXPECT_EQ(counter.bytes(), static_cast<int64_t>(x.nbytes()));
  const auto first = torch::autograd::grad({y.pow(3).sum()}, {x}, {}, /*retain_graph=*/true,
                                           /*create_graph=*/true);
  const auto second = torch::autograd::grad({first[0].sum()}, {x});
  const at::Tensor slope = y / x;  // y = slope x, so y^3 has the second derivative 6 slope^3 x
  EXPECT_TRUE(at::allclose(second[0], slope.pow(3) * x * 6));
}

TEST(FusedDropout, AFrozenInputGetsNoGradient) {
  const at::Tensor x = wavy({3, 2, 6}, 0.2), residual = wavy({3, 2, 6}, 0.9).requires_grad_(true);
  dropout_of(0.4).add(x, residual, {}, true).sum().backward();
  EXPECT_FALSE(x.grad().defined());
  EXPECT_TRUE(at::equal(residual.grad(), at::ones_like(residual)));
}

TEST(FusedLayers, RefuseSecondDerivatives) {
  const auto refuses = [](const at::Tensor& output, const at::Tensor& input, const char* name) {
    return testing::throws_with<UsageError>(
        [&] {
          torch::autograd::grad({output.sum()}, {input}, {}, /*retain_graph=*/true,
                                /*create_graph=*/true);
        },
        std::string(name) + ": found backward with create_graph");
  };
  const at::Tensor x = wavy({2, 4}, 0).requires_grad_(true);
  EXPECT_TRUE(refuses(norm_of(4, Normalization::RMSNorm).forward(x), x, "norm"));
  EXPECT_TRUE(refuses(activate(Activation::swiglu, x), x, "swiglu"));
  const at::Tensor packed = wavy({2, 1, 1, 3, 8}, 0).requires_grad_(true);
  EXPECT_TRUE(refuses(rotary_of(1).heads_of(packed, {0, 1}).query, packed, "rotary embedding"));
}

}  // namespace
}  // namespace lockstep
