#include "lockstep/kernels/adamw.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/kernels/narrow_floats.h"
#include "lockstep/tests/support/adamw_scalars.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

using testing::scalars_of_step;
using testing::throws_with;

struct Tensors {
  at::Tensor p, g, m, v;

  static Tensors make(int64_t n, at::ScalarType dtype) {
    const at::Tensor x = at::arange(1, n + 1, at::kDouble);
    return {at::sin(x).to(dtype), at::cos(x * 1.7).to(dtype), (at::sin(x * 0.3) * 0.1).to(dtype),
            (at::cos(x * 0.9).square() * 0.01).to(dtype)};
  }
  void step(const std::vector<UpdateSegment>& segments, const AdamWScalars& scalars,
            const at::Tensor& low = {}) const {
    adamw(p, g, m, v, low, segments, scalars);
  }
};

/// PyTorch's own fused AdamW.
void torch_step(Tensors& t, int step, double weight_decay) {
  at::_fused_adamw_({t.p}, {t.g}, {t.m}, {t.v}, {}, {at::full({}, step, at::kFloat)}, 0.01, 0.9,
                    0.95, weight_decay, 1e-8, /*amsgrad=*/false, /*maximize=*/false);
}

TEST(AdamW, EqualsPyTorchInDouble) {
  for (const int64_t n : {1, 7, 64, 1000}) {
    Tensors ours = Tensors::make(n, at::kDouble), theirs = Tensors::make(n, at::kDouble);
    for (int step = 1; step <= 5; ++step) {
      ours.step({{0, n}}, scalars_of_step(step));
      torch_step(theirs, step, 0.1);
    }
    EXPECT_TRUE(at::allclose(ours.p, theirs.p, 1e-12, 1e-14));
    EXPECT_TRUE(at::allclose(ours.m, theirs.m, 1e-12, 1e-14));
    EXPECT_TRUE(at::allclose(ours.v, theirs.v, 1e-12, 1e-14));
  }
}

TEST(AdamW, Bf16GradientsCountAsTheirValues) {
  constexpr int64_t kNumel = 5001;
  Tensors narrow = Tensors::make(kNumel, at::kFloat), wide = Tensors::make(kNumel, at::kFloat);
  narrow.g = narrow.g.to(at::kBFloat16);
  wide.g = narrow.g.to(at::kFloat);
  for (int step = 1; step <= 2; ++step)
    for (const Tensors& tensors : {narrow, wide})
      tensors.step({{0, 1000}, {1003, kNumel}}, scalars_of_step(step));
  EXPECT_TRUE(at::equal(narrow.p, wide.p));
  EXPECT_TRUE(at::equal(narrow.v, wide.v));
}

TEST(AdamW, EqualsPyTorchInSingle) {
  Tensors ours = Tensors::make(1003, at::kFloat), theirs = Tensors::make(1003, at::kFloat);
  for (int step = 1; step <= 5; ++step) {
    ours.step({{0, 1003}}, scalars_of_step(step));
    torch_step(theirs, step, 0.1);
  }
  EXPECT_TRUE(at::allclose(ours.p, theirs.p, 1e-6, 1e-7));
}

TEST(AdamW, LeavesWhatIsInNoSegmentToAStepWithOtherNumbers) {
  Tensors ours = Tensors::make(100, at::kDouble), decayed = Tensors::make(100, at::kDouble),
          plain = Tensors::make(100, at::kDouble);
  const at::Tensor before = ours.p.clone();
  AdamWScalars without_decay = scalars_of_step(1);
  without_decay.weight_decay = 0;
  ours.step({{3, 20}, {50, 100}}, scalars_of_step(1));
  ours.step({{20, 40}}, without_decay);
  torch_step(decayed, 1, 0.1);
  torch_step(plain, 1, 0);
  const auto same = [&](const at::Tensor& expected, int64_t start, int64_t end) {
    return at::allclose(ours.p.slice(0, start, end), expected.slice(0, start, end), 1e-13, 1e-15);
  };
  EXPECT_TRUE(same(before, 0, 3));
  EXPECT_TRUE(same(decayed.p, 3, 20));
  EXPECT_TRUE(same(plain.p, 20, 40));
  EXPECT_TRUE(same(before, 40, 50));
  EXPECT_TRUE(same(decayed.p, 50, 100));
}

TEST(AdamW, EveryCutGivesTheSameBits) {
  for (const auto dtype : {at::kFloat, at::kDouble}) {
    Tensors whole = Tensors::make(200003, dtype), cut = Tensors::make(200003, dtype);
    whole.step({{0, 200003}}, scalars_of_step(3));
    cut.step({{0, 1}, {1, 18}, {18, 100001}, {100001, 200003}}, scalars_of_step(3));
    EXPECT_TRUE(at::equal(whole.p, cut.p));
    EXPECT_TRUE(at::equal(whole.v, cut.v));
  }
}

TEST(AdamW, GradientScaleComesFirst) {
  Tensors ours = Tensors::make(50, at::kDouble), theirs = Tensors::make(50, at::kDouble);
  AdamWScalars scalars = scalars_of_step(1);
  scalars.grad_scale = 0.25;
  ours.step({{0, 50}}, scalars);
  theirs.g.mul_(0.25);
  torch_step(theirs, 1, 0.1);
  EXPECT_TRUE(at::allclose(ours.p, theirs.p, 1e-13, 1e-15));
  EXPECT_TRUE(at::allclose(ours.m, theirs.m, 1e-13, 1e-15));
}

TEST(AdamW, LowPrecisionCopyIsRoundedToNearestEven) {
  Tensors ours = Tensors::make(1003, at::kFloat);
  const at::Tensor low = at::zeros({1003}, at::kBFloat16);
  ours.step({{0, 1003}}, scalars_of_step(1), low);
  EXPECT_TRUE(at::equal(low, ours.p.to(at::kBFloat16)));

  const float inf = std::numeric_limits<float>::infinity();
  const at::Tensor special = at::tensor({1.00390625f, 1.01171875f, inf, -inf, 3.4e38f, -0.0f,
                                         std::numeric_limits<float>::quiet_NaN(), 1e-40f});
  at::Tensor rounded = at::zeros({8}, at::kBFloat16);
  round_to_bf16_loop(special.const_data_ptr<float>(),
                     reinterpret_cast<uint16_t*>(rounded.data_ptr<at::BFloat16>()), 8);
  EXPECT_TRUE(at::allclose(rounded.to(at::kFloat), special.to(at::kBFloat16).to(at::kFloat), 0, 0,
                           /*equal_nan=*/true));
}

TEST(AdamW, RefusesWhatItCannotServe) {
  Tensors t = Tensors::make(10, at::kFloat);
  const AdamWScalars scalars = scalars_of_step(1);
  EXPECT_TRUE(throws_with<UsageError>([&] { t.step({{0, 11}}, scalars); }, "segment [0, 11)"));
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        t.step({{5, 7}, {6, 8}}, scalars);
      },
      "segment [6, 8) after 7"));
  t.g = t.g.to(at::kDouble);
  EXPECT_TRUE(throws_with<UsageError>(
      [&] {
        t.step({{0, 10}}, scalars);
      },
      "grad is 10 elements of Double"));
}

}  // namespace
}  // namespace lockstep::kernels
