// clip_grad_norm_ of parameters on meshes: the golden cases GN1 to GN4 and GM1, and comparisons
// with PyTorch.

#include "lockstep/optimizer/clip_grad_norm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/utils/clip_grad.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/mesh_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::ones_on;
using testing::run_ranks;
using testing::sent_by;
using testing::throws_with;
using Sent = std::vector<std::string>;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::optional<double> kNoClipping = std::nullopt;

/// A parameter of ones whose gradient is `value` everywhere.
MeshParameter with_grad(MeshParameter param, double value) {
  param.tensor.mutable_grad() = at::full_like(param.tensor, value).detach();
  return param;
}

at::Tensor leaf_with_grad(const at::Tensor& grad) {
  at::Tensor tensor = at::zeros_like(grad).requires_grad_(true);
  tensor.mutable_grad() = grad.clone();
  return tensor;
}

TEST(ClipGradNorm, GN1StagesWithAndWithoutShardedParameters) {
  CollectiveLog log;
  run_ranks(
      16,
      [](const ParallelState& state) {
        const DeviceMesh mesh(state, {4, 2, 2}, {"pp", "rep", "ep"});
        const DeviceMesh grid = mesh.slice({"rep", "ep"});
        const int64_t stage = mesh.get_local_rank("pp");
        std::vector<MeshParameter> params;
        if (stage == 0)
          params.push_back(with_grad(ones_on(grid, {8, 8}, {Replicate{}, Replicate{}}, "a"), 1));
        if (stage == 1)
          params.push_back(with_grad(ones_on(grid, {8, 16}, {Replicate{}, Shard{1}}, "b"), 1));
        const at::Tensor norm =
            clip_grad_norm_(params, 1.0, 2, /*error_if_nonfinite=*/true, {}, mesh["pp"]);
        EXPECT_NEAR(norm.item<double>(), 13.856406460551018, 1e-14);
        for (const MeshParameter& param : params)
          EXPECT_TRUE(
              at::allclose(param.tensor.grad(), at::full_like(param.tensor, 0.0721687836), 1e-6));
      },
      {.log = &log});
  EXPECT_EQ(sent_by(log, 1), (Sent{"all_reduce (sum) [1 5 9 13] 8"}));
  EXPECT_EQ(sent_by(log, 5), (Sent{"all_reduce (sum) [4 5] 8", "all_reduce (sum) [1 5 9 13] 8"}));
  EXPECT_EQ(sent_by(log, 13), (Sent{"all_reduce (sum) [1 5 9 13] 8"}));
}

TEST(ClipGradNorm, GN2EqualsPyTorchOnOneProcess) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat})
    for (const double p : {0.5, 1.0, 2.0, 3.0, kInf})
      for (const std::optional<double> max_norm :
           {std::optional<double>(1), std::optional<double>(5), std::optional<double>(1000),
            kNoClipping})
        for (const std::optional<bool> foreach :
             {std::optional<bool>(), std::optional<bool>(true), std::optional<bool>(false)}) {
          std::vector<at::Tensor> ours, theirs;
          for (const double shift : {0.1, 0.7}) {
            const at::Tensor grad =
                at::sin(at::arange(100, at::kDouble) * 3.1 + shift).view({10, 10}).to(dtype);
            ours.push_back(leaf_with_grad(grad));
            theirs.push_back(leaf_with_grad(grad));
          }
          const at::Tensor norm = clip_grad_norm_(ours, max_norm, p, false, foreach);
          EXPECT_EQ(norm.dim(), 0);
          EXPECT_EQ(norm.scalar_type(), at::kDouble);
          const double expected =
              torch::nn::utils::clip_grad_norm_(theirs, max_norm.value_or(1e30), p);
          const double tolerance = dtype == at::kDouble ? 1e-13 : 2e-6;
          EXPECT_NEAR(norm.item<double>(), expected, tolerance * expected) << p;
          for (size_t i = 0; i < ours.size(); ++i)
            EXPECT_TRUE(at::allclose(ours[i].grad(), theirs[i].grad(), tolerance)) << p;
        }
}

TEST(ClipGradNorm, GN3WithoutParametersItIsZeroAndStagesStillMeet) {
  EXPECT_EQ(clip_grad_norm_(MeshParameters(), 1.0).item<double>(), 0);
  CollectiveLog log;
  run_ranks(2,
            [](const ParallelState& state) {
              const DeviceMesh stages(state, {2}, {"pp"});
              std::vector<at::Tensor> params;
              if (state.rank() == 1) params.push_back(leaf_with_grad(at::full({4}, 3.0)));
              EXPECT_EQ(clip_grad_norm_(params, 1.0, 2, true, {}, stages).item<double>(), 6);
              EXPECT_EQ(clip_grad_norm_(MeshParameters(), 1.0, 2, true, {}, stages).item<double>(),
                        0);
            },
            {.log = &log});
  EXPECT_EQ(sent_by(log, 0), Sent(2, "all_reduce (sum) [0 1] 8"));
}

TEST(ClipGradNorm, GN4OneReductionForEveryGroupThatShards) {
  CollectiveLog log;
  run_ranks(8,
            [](const ParallelState& state) {
              const DeviceMesh grid(state, {2, 2, 2}, {"a", "b", "c"});
              const std::vector<Placement> nowhere(3, Replicate{});
              const auto param = [&](std::vector<Placement> placements, double value) {
                return with_grad(ones_on(grid, {4, 4}, placements, "", at::kDouble), value);
              };
              const MeshParameters params = {
                  param(nowhere, 1), param({Replicate{}, Replicate{}, Shard{0}}, 2),
                  param({Shard{1}, Replicate{}, Shard{0}}, 3),
                  param({Shard{1}, Replicate{}, Shard{0}}, 4),
                  param({Shard{1}, Replicate{}, Replicate{}}, 5),
                  leaf_with_grad(at::full({16}, 6., at::kDouble)),
                  // The same group as "a", on another mesh.
                  with_grad(ones_on(grid["a"], {16}, {Shard{0}}, "", at::kDouble), 7)};
              const double squares = 16. * (1 + 4 + 9 + 16 + 25 + 36 + 49);
              for (const double p : {2.0, 1.0, kInf}) {
                const double expected = p == 2   ? std::sqrt(squares)
                                        : p == 1 ? 16. * (1 + 2 + 3 + 4 + 5 + 6 + 7)
                                                 : 7;
                EXPECT_NEAR(clip_grad_norm_(params, kNoClipping, p).item<double>(), expected,
                            1e-13 * expected);
              }
            },
            {.log = &log});
  const Sent sums = {"all_reduce (sum) [2 3] 8", "all_reduce (sum) [2 3 6 7] 8",
                     "all_reduce (sum) [2 6] 8"};
  Sent maxima;
  for (std::string call : sums) maxima.push_back(call.replace(12, 3, "max"));
  Sent expected = sums;  // p = 2, then p = 1, then infinity
  for (const Sent& calls : {maxima, sums, maxima})
    expected.insert(expected.end(), calls.begin(), calls.end());
  EXPECT_EQ(sent_by(log, 2), expected);
}

TEST(ClipGradNorm, GM1ATiedEmbeddingOfTwoStagesCountsOnce) {
  for (const bool tied : {true, false})
    run_ranks(2, [&](const ParallelState& state) {
      // 400 elements of the embedding and 400 of the stage, all ones: 800 in all, not 1600.
      const DeviceMesh stages(state, {2}, {"pp"});
      std::vector<MeshParameter> params = {
          with_grad(ones_on(stages, {20, 20}, {Replicate{}}, "embedding"), 1),
          leaf_with_grad(at::ones({state.rank() == 0 ? 400 : 0}))};
      if (!tied) {
        params[0] = leaf_with_grad(at::ones({20, 20}));
        params[1] = leaf_with_grad(at::ones({400}));
      }
      params.push_back(params[0]);  // as if a module held it twice
      const at::Tensor norm = clip_grad_norm_(params, 1.0, 2, false, {}, stages);
      EXPECT_NEAR(norm.item<double>(), tied ? 28.284271247461902 : 40, 1e-13);
      EXPECT_NEAR(params[0].tensor.grad()[3][4].item<double>(), 1 / norm.item<double>(), 1e-7);
    });
}

TEST(ClipGradNorm, ATiedEmbeddingThatIsShardedCountsOnTheFirstStage) {
  run_ranks(8, [](const ParallelState& state) {
    const DeviceMesh mesh(state, {4, 2}, {"pp", "tp"});
    const int64_t stage = mesh.get_local_rank("pp"), tp = mesh.get_local_rank("tp");
    // The first and the last stage share this parameter.
    const DeviceMesh ends(state, {2, 2}, {"ends", "tp"}, RankList{0, 1, 6, 7});
    std::vector<MeshParameter> params;
    if (stage == 0 || stage == 3)
      params.push_back(with_grad(ones_on(ends, {6, 5}, {Replicate{}, Shard{0}}, "embedding"), 2));
    params.push_back(with_grad(ones_on(mesh["tp"], {4}, {Shard{0}}, "own"), 1));
    const at::Tensor norm = clip_grad_norm_(params, kNoClipping, 2, false, {}, mesh["pp"]);
    EXPECT_NEAR(norm.item<double>(), std::sqrt(30. * 4 + 4 * 4), 1e-13) << tp;
  });
}

TEST(ClipGradNorm, DTensorsOfSeveralMeshesAndPlainTensorsTogether) {
  // 32 from a DTensor and 18 from a plain tensor: the norm is the square root of 50.
  run_ranks(2, [](const ParallelState& state) {
    const MeshParameters params = {
        with_grad(ones_on(DeviceMesh(state, {2}, {"tp"}), {8}, {Shard{0}}, "sharded"), 2),
        leaf_with_grad(at::full({2}, 3., at::kBFloat16)), at::ones({7}).requires_grad_(true)};
    EXPECT_NEAR(clip_grad_norm_(params, 1.0).item<double>(), 7.0710678118654755, 1e-14);
    EXPECT_NEAR(params[0].tensor.grad()[0].item<double>(), 2 / 7.0710688, 1e-7);
    EXPECT_EQ(params[1].tensor.grad().scalar_type(), at::kBFloat16);
    EXPECT_FALSE(params[2].tensor.grad().defined());
  });
}

TEST(ClipGradNorm, ManyElementsOfHalfPrecisionDoNotSaturate) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kHalf}) {
    const at::Tensor param = leaf_with_grad(at::full({512, 512}, 2., dtype));
    EXPECT_EQ(clip_grad_norm_({param}, 512.0).item<double>(), 1024);
    EXPECT_EQ(param.grad()[7][9].item<double>(), 1);
  }
}

TEST(ClipGradNorm, WhatIsNotFiniteThrowsOnEveryRankOrSpoilsTheGradientsAsInPyTorch) {
  for (const double poison : {kInf, std::nan("")})
    for (const double p : {1.0, 2.0, kInf}) {
      const auto errors = errors_of_ranks(2, [&](const ParallelState& state) {
        MeshParameter param =
            with_grad(ones_on(DeviceMesh(state, {2}, {"tp"}), {8}, {Shard{0}}, "weight"), 2);
        if (state.rank() == 1) param.tensor.mutable_grad()[2] = poison;
        EXPECT_FALSE(std::isfinite(clip_grad_norm_({param}, kNoClipping, p).item<double>()));
        clip_grad_norm_({param}, 1.0, p, /*error_if_nonfinite=*/true);
      });
      EXPECT_NE(errors[0].find("-norm of the gradients is "), std::string::npos) << errors[0];
      EXPECT_NE(errors[1].find("the gradient of 'weight' holds NaN or infinity"), std::string::npos)
          << errors[1];
    }
  const at::Tensor ours = leaf_with_grad(at::tensor({1., kInf}));
  clip_grad_norm_({ours}, 1.0);
  const at::Tensor theirs = leaf_with_grad(at::tensor({1., kInf}));
  torch::nn::utils::clip_grad_norm_(std::vector<at::Tensor>{theirs}, 1.0);
  EXPECT_TRUE(at::allclose(ours.grad(), theirs.grad(), 1e-6, 0, /*equal_nan=*/true));
}

/// Gradients with every kind of memory layout.
std::vector<std::pair<const char*, at::Tensor>> odd_gradients() {
  const at::Tensor values = at::sin(at::arange(48, at::kFloat) * 3.1 + 0.2);
  const at::Tensor complex = at::complex(values.slice(0, 0, 24), values.slice(0, 24, 48));
  return {{"every second row", values.view({8, 6}).slice(0, 0, 8, 2)},
          {"every third element", values.slice(0, 1, 48, 3)},
          {"transposed", values.view({8, 6}).t()},
          {"channels last", values.view({2, 2, 3, 4}).contiguous(at::MemoryFormat::ChannelsLast)},
          {"expanded", values.slice(0, 0, 6).expand({5, 6})},
          {"expanded from one", values.slice(0, 3, 4).expand({7})},
          {"a view expanded twice", values.slice(0, 0, 8, 2).view({1, 4, 1}).expand({3, 4, 2})},
          {"fp16, strided", values.to(at::kHalf).slice(0, 0, 48, 5)},
          {"bf16, strided", values.to(at::kBFloat16).slice(0, 0, 48, 5)},
          {"complex", complex},
          {"complex, strided", complex.slice(0, 0, 24, 2)},
          {"complex, conjugated", complex.view({4, 6}).conj().t()},
          {"complex fp64", complex.to(at::kComplexDouble)}};
}

/// |g| in fp64, flat.
at::Tensor magnitudes(const at::Tensor& grad) {
  return grad.to(grad.is_complex() ? at::kComplexDouble : at::kDouble).abs().flatten();
}

TEST(ClipGradNorm, GradientsOfEveryKindOfMemoryAndComplexOnesCountForEveryNorm) {
  for (const double p : {0.5, 1.0, 2.0, 3.0, kInf})
    for (const bool foreach : {true, false})
      for (const auto& [kind, grad] : odd_gradients()) {
        const at::Tensor size = magnitudes(grad);
        const double expected = std::isinf(p) ? size.max().item<double>()
                                              : std::pow(size.pow(p).sum().item<double>(), 1 / p);
        const at::Tensor param = at::zeros(grad.sizes(), grad.options()).requires_grad_(true);
        // clone() keeps strides only of dense memory, so this copies the storage.
        const at::Tensor storage =
            at::empty({0}, grad.options())
                .set_(grad.storage(), 0,
                      static_cast<int64_t>(grad.storage().nbytes()) / grad.element_size(), {1})
                .clone();
        const at::Tensor own =
            storage.as_strided(grad.sizes(), grad.strides(), grad.storage_offset());
        param.mutable_grad() = grad.is_conj() ? own.conj() : own;
        const void* const place = param.grad().data_ptr();
        const at::Tensor norm = clip_grad_norm_({MeshParameter(param, "odd")}, 0.5 * expected, p,
                                                /*error_if_nonfinite=*/true, foreach);
        EXPECT_NEAR(norm.item<double>(), expected, 1e-12 * expected) << kind << ", p " << p;
        EXPECT_EQ(param.grad().data_ptr(), place) << kind;
        const double tolerance = grad.element_size() == 2 ? 1e-2 : 1e-6;
        const double coefficient = 0.5 * expected / (expected + 1e-6);
        EXPECT_TRUE(at::allclose(magnitudes(param.grad()), size * coefficient, tolerance, 1e-7))
            << kind << ", p " << p;
      }
}

TEST(ClipGradNorm, AComplexShardIsPutTogetherOverItsRanks) {
  for (const double p : {1.0, 2.0, 3.0, kInf})
    run_ranks(2, [&](const ParallelState& state) {
      MeshParameter param =
          ones_on(DeviceMesh(state, {2}, {"tp"}), {4}, {Shard{0}}, "complex", at::kComplexFloat);
      const double scale = 1. + state.rank();
      param.tensor.mutable_grad() =
          at::complex(at::full({2}, 3 * scale), at::full({2}, 4 * scale)).to(at::kComplexFloat);
      const double expected =
          std::isinf(p) ? 10 : std::pow(2 * (std::pow(5., p) + std::pow(10., p)), 1 / p);
      EXPECT_NEAR(clip_grad_norm_({param}, kNoClipping, p).item<double>(), expected, 1e-12 * 30);
    });
}

TEST(ClipGradNorm, GradientsThatItCannotTakeAreNamedOnEveryRank) {
  const auto errors_of = [](const at::Tensor& grad, double p) {
    return errors_of_ranks(2, [&](const ParallelState& state) {
      MeshParameter param = with_grad(
          ones_on(DeviceMesh(state, {2}, {"tp"}), {4}, {Shard{0}}, "odd", grad.scalar_type()), 1);
      if (state.rank() == 1) param.tensor.mutable_grad() = grad;
      clip_grad_norm_({param}, 1.0, p);
    });
  };
  for (const double p : {1.0, 2.0, kInf}) {
    for (const std::string& error : errors_of(at::ones({2}, at::kComplexHalf), p))
      EXPECT_NE(error.find("clip_grad_norm_: the gradient of 'odd' is ComplexHalf, allowed: Float, "
                           "Double, BFloat16, Half, ComplexFloat, ComplexDouble"),
                std::string::npos)
          << error;
  }
  // Overlapping windows: no element can be multiplied without its neighbour.
  const at::Tensor window = at::zeros({3, 2}).requires_grad_(true);
  window.mutable_grad() = at::arange(4, at::kFloat).as_strided({3, 2}, {1, 1});
  for (const double p : {1.0, 2.0, kInf}) {
    EXPECT_TRUE(throws_with<UsageError>(
        [&] { clip_grad_norm_({MeshParameter(window, "window")}, 1.0, p); },
        "clip_grad_norm_: the gradient of 'window' has elements that share memory"));
    const double expected = p == 1 ? 9 : p == 2 ? std::sqrt(1. + 1 + 4 + 4 + 9) : 3;
    EXPECT_NEAR(clip_grad_norm_({window}, kNoClipping, p).item<double>(), expected, 1e-14);
  }
}

TEST(ClipGradNorm, WrongArgumentsAreNamed) {
  const at::Tensor param = leaf_with_grad(at::ones({2}));
  EXPECT_TRUE(throws_with<UsageError>([&] { clip_grad_norm_({param}, 1.0, 0.0); },
                                      "norm_type: found 0, allowed: > 0"));
  EXPECT_TRUE(throws_with<UsageError>([&] { clip_grad_norm_({param}, -1.0); },
                                      "max_norm: found -1, allowed: >= 0"));
  const at::Tensor table = at::ones({4, 2}).requires_grad_(true);
  at::embedding(table, at::arange(2), -1, false, /*sparse=*/true).sum().backward();
  EXPECT_TRUE(
      throws_with<UsageError>([&] { clip_grad_norm_({MeshParameter(table, "table")}, 1.0); },
                              "the gradient of 'table' is sparse"));
  const DeviceMesh mesh(ParallelState::single_process(), {1}, {"dp"});
  const DTensor term = DTensor::from_local(param, mesh, {Partial{}});
  EXPECT_TRUE(throws_with<UsageError>([&] { clip_grad_norm_({MeshParameter(term, "term")}, 1.0); },
                                      "parameter 'term': found Partial(sum) on axis 'dp'"));
}

}  // namespace
}  // namespace lockstep
