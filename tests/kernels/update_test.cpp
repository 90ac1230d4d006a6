#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/optim/sgd.h>

#include "lockstep/core/error.h"
#include "lockstep/kernels/adamw.h"
#include "lockstep/kernels/narrow_floats.h"
#include "lockstep/kernels/sgd.h"
#include "lockstep/tests/support/adamw_scalars.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

using testing::scalars_of_step;
using testing::throws_with;

at::Tensor wave(int64_t n, double pace, at::ScalarType dtype = at::kFloat) {
  return at::sin(at::arange(1, n + 1, at::kDouble) * pace).to(dtype);
}

template <class T>
uint16_t* bits_of(const at::Tensor& tensor) {
  return reinterpret_cast<uint16_t*>(tensor.data_ptr<T>());
}

TEST(NarrowFloats, EveryFp16NumberHasItsValue) {
  const at::Tensor halves = at::arange(0, 65536, at::kInt).to(at::kShort).view(at::kHalf);
  const at::Tensor found = at::empty({65536}), expected = halves.to(at::kFloat);
  widen_fp16_loop(bits_of<at::Half>(halves), found.data_ptr<float>(), 65536);
  EXPECT_TRUE(at::equal(found.isnan(), expected.isnan()));
  EXPECT_TRUE(at::equal(found.nan_to_num(7).view(at::kInt), expected.nan_to_num(7).view(at::kInt)));
}

TEST(NarrowFloats, RoundingToFp16IsLibtorchs) {
  // All fp16 numbers, the midpoints between them and their nearest neighbours; both signs.
  const at::Tensor halves = at::arange(0, 0x7C00, at::kInt).to(at::kShort).view(at::kHalf);
  const at::Tensor exact = halves.to(at::kDouble);
  const at::Tensor middles = at::cat(
      {(exact.slice(0, 0, -1) + exact.slice(0, 1)) / 2, at::full({1}, 65520.0, at::kDouble)});
  const at::Tensor beside = at::cat({middles, middles * (1 + 1e-7), middles * (1 - 1e-7), exact});
  const at::Tensor large = at::tensor({7e4, 1e30, 3e38, 1e-8, 1e-40});
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const at::Tensor positive =
      at::cat({beside.to(at::kFloat), large.to(at::kFloat), at::full({1}, kInfinity)});
  const at::Tensor values = at::cat({positive, -positive});
  const at::Tensor found = at::empty({values.numel()}, at::kHalf), expected = values.to(at::kHalf);
  round_to_fp16_loop(values.const_data_ptr<float>(), bits_of<at::Half>(found), values.numel());
  EXPECT_TRUE(at::equal(found.view(at::kShort), expected.view(at::kShort)));
  const at::Tensor nan = at::full({1}, std::nanf("")), half = at::empty({1}, at::kHalf);
  round_to_fp16_loop(nan.const_data_ptr<float>(), bits_of<at::Half>(half), 1);
  EXPECT_TRUE(half.isnan().item<bool>());
}

TEST(AdamWUpdate, NarrowMomentsAreThoseOfTheStepRounded) {
  constexpr int64_t kNumel = 5001;  // whole blocks and a remainder
  for (const at::ScalarType low : {at::kBFloat16, at::kHalf})
    for (const bool narrow_square : {false, true}) {
      const at::Tensor
          p = wave(kNumel, 1.3),
          g = wave(kNumel, 0.7).to(low), m = wave(kNumel, 0.2, at::kBFloat16),
          v = wave(kNumel, 0.4).square().to(narrow_square ? at::kBFloat16 : at::kFloat),
          copy = at::zeros({kNumel}, low);
      const at::Tensor p2 = p.clone(), m2 = m.to(at::kFloat), v2 = v.clone().to(at::kFloat);
      const std::vector<UpdateSegment> segments = {{0, 1000}, {1000, kNumel}};
      adamw(p, g, m, v, copy, segments, scalars_of_step(1));
      adamw(p2, g.to(at::kFloat), m2, v2, {}, segments, scalars_of_step(1));
      EXPECT_TRUE(at::equal(p, p2));
      EXPECT_TRUE(at::equal(m, m2.to(at::kBFloat16)));
      EXPECT_TRUE(at::equal(v, v2.to(v.scalar_type())));
      EXPECT_TRUE(at::equal(copy, p2.to(low)));
    }
}

TEST(SgdUpdate, EqualsPyTorchsOptimizer) {
  for (const at::ScalarType dtype : {at::kDouble, at::kFloat})
    for (const double momentum : {0.0, 0.9})
      for (const bool decay : {false, true}) {
        constexpr int64_t kNumel = 1003;
        at::Tensor theirs = wave(kNumel, 1.1, dtype).requires_grad_(true);
        torch::optim::SGD oracle(
            {theirs},
            torch::optim::SGDOptions(0.1).momentum(momentum).weight_decay(decay ? 0.05 : 0));
        const at::Tensor p = wave(kNumel, 1.1, dtype);
        const at::Tensor buffer = momentum > 0 ? at::zeros({kNumel}, dtype) : at::Tensor();
        for (int step = 0; step < 5; ++step) {
          const at::Tensor grad = wave(kNumel, 0.3 + step, dtype);
          theirs.mutable_grad() = grad * 0.5;
          oracle.step();
          sgd(p, grad, buffer, {}, {{0, kNumel}},
              {.learning_rate = 0.1,
               .momentum = momentum,
               .weight_decay = decay ? 0.05 : 0,
               .grad_scale = 0.5});
        }
        const double tolerance = dtype == at::kDouble ? 1e-13 : 1e-6;
        EXPECT_TRUE(at::allclose(p, theirs, tolerance, tolerance)) << dtype << momentum << decay;
      }
}

TEST(SgdUpdate, NarrowTensorsAreConvertedBlockByBlock) {
  constexpr int64_t kNumel = 5001;
  const SgdScalars scalars = {.learning_rate = 0.1, .momentum = 0.9, .weight_decay = 0.1};
  const at::Tensor p = wave(kNumel, 1.3), g = wave(kNumel, 0.7, at::kHalf), b = wave(kNumel, 0.2),
                   copy = at::zeros({kNumel}, at::kHalf), p2 = p.clone(), b2 = b.clone();
  sgd(p, g, b, copy, {{3, 1000}, {2000, kNumel}}, scalars);
  sgd(p2, g.to(at::kFloat), b2, {}, {{3, 1000}, {2000, kNumel}}, scalars);
  EXPECT_TRUE(at::equal(p, p2));
  EXPECT_TRUE(at::equal(b, b2));
  EXPECT_TRUE(at::equal(copy.slice(0, 2000), p2.slice(0, 2000).to(at::kHalf)));
  EXPECT_EQ(copy.slice(0, 1000, 2000).count_nonzero().item<int64_t>(), 0);
}

TEST(StepControl, ScalesTheGradientsOrLeavesTheStepOut) {
  const at::Tensor control = at::tensor({0.25, 1.0}, at::kDouble);
  const at::Tensor nothing = at::tensor({std::nan(""), 0.0}, at::kDouble);
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    const at::Tensor start = wave(100, 1.3, dtype), g = wave(100, 0.7, dtype);
    const auto run = [&](const StepControl& how, double grad_scale) {
      const at::Tensor p = start.clone(), m = at::zeros_like(p), v = at::zeros_like(p);
      AdamWScalars scalars = scalars_of_step(1);
      scalars.grad_scale = grad_scale;
      adamw(p, g, m, v, {}, {{0, 100}}, scalars, how);
      sgd(p, g, v, {}, {{0, 100}},
          {.learning_rate = 0.1, .momentum = 0.9, .grad_scale = grad_scale}, how);
      return at::cat({p, m, v});
    };
    EXPECT_TRUE(at::equal(run(control, 1), run({}, 0.25)));
    EXPECT_TRUE(at::equal(run(nothing, 1).slice(0, 0, 100), start));
    EXPECT_EQ(run(nothing, 1).slice(0, 100).count_nonzero().item<int64_t>(), 0);
  }
}

TEST(FlatUpdates, NameTheOperandThatDoesNotFit) {
  const at::Tensor p = at::zeros({4}), fp16 = at::zeros({4}, at::kHalf);
  const std::vector<UpdateSegment> all = {{0, 4}};
  EXPECT_TRUE(throws_with<UsageError>([&] { adamw(p, p, fp16, p, {}, all, {}); },
                                      "exp_avg is 4 elements of Half"));
  EXPECT_TRUE(throws_with<UsageError>([&] { sgd(p, p, {}, p, all, {}); }, "low_precision is"));
  EXPECT_TRUE(throws_with<UsageError>([&] { sgd(p, p, {}, {}, all, {.momentum = 0.5}); },
                                      "a momentum of 0.5 without"));
  EXPECT_TRUE(throws_with<UsageError>([&] { sgd(p, p, {}, {}, all, {}, at::zeros({2})); },
                                      "control must be 2"));
}

}  // namespace
}  // namespace lockstep::kernels
