// Experts in 8-bit floats: products and gradients against fp64, on operands that are rounded by the
// test, and the scales that the experts of a layer share.

#include <array>
#include <limits>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/models/grouped_linear.h"
#include "lockstep/tests/models/fp8_operands.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using namespace testing;  // NOLINT

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kFp32 = 1e-5;
constexpr int64_t kBehind = 3;  ///< rows of no expert
/// Fewer than 16, more, a multiple of 16, and none for the expert with the largest weight.
const std::vector<int64_t> kRows = {5, 19, 16, 0};

RowGroupsPtr groups_with(const std::vector<int64_t>& rows) {
  return c10::make_intrusive<kernels::RowGroups>(at::tensor(rows).cumsum(0).to(at::kInt));
}

/// fp32, whose products with a scale are halfway between two numbers of 8 bits next to never.
at::Tensor fine_noise(at::IntArrayRef shape, uint64_t seed, double size = 1) {
  return noise(shape, seed, size).to(at::kFloat) *
         (1 + noise(shape, seed + 1000, 0.01).to(at::kFloat));
}

/// One use of experts with `rows` each. The operands of each expert have another size, and the rows
/// of no expert are NaN.
struct ExpertUse {
  std::vector<int64_t> rows;
  at::Tensor x, w, g, output = {};

  ExpertUse(std::vector<int64_t> of_experts, uint64_t seed) : rows(std::move(of_experts)) {
    const int64_t behind = std::accumulate(rows.begin(), rows.end(), kBehind);
    const auto experts = static_cast<int64_t>(rows.size());
    x = fine_noise({behind, kIn}, seed);
    g = fine_noise({behind, kOut}, seed + 1, 1e-6);
    w = fine_noise({experts, kOut, kIn}, seed + 2, 0.02);
    for_experts([&](int64_t expert, int64_t first, int64_t count) {
      x.narrow(0, first, count).mul_(std::exp2(-expert));
      g.narrow(0, first, count).mul_(std::exp2(expert));
      w[expert].mul_(1 + 0.5 * static_cast<double>(expert));
    });
    x.narrow(0, behind - kBehind, kBehind).fill_(kNaN);
    g.narrow(0, behind - kBehind, kBehind).fill_(kNaN);
    x.requires_grad_(true);
    w.requires_grad_(true);
  }

  template <class Visit>
  void for_experts(Visit visit) const {
    int64_t first = 0;
    for (size_t expert = 0; expert < rows.size(); first += rows[expert++])
      if (rows[expert] > 0) visit(static_cast<int64_t>(expert), first, rows[expert]);
  }

  void run(const std::shared_ptr<const Fp8Layer>& layer) {
    output = grouped_linear(x, w, groups_with(rows), layer);
    output.backward(g);
  }

  /// The results of each expert; `round` makes operands for the products of an expert's x, w and g.
  template <class Round>
  void expect(Round round) const {
    for_experts([&](int64_t expert, int64_t first, int64_t count) {
      SCOPED_TRACE(expert);
      const at::Tensor own = x.detach().narrow(0, first, count);
      const Operands forward = round(own, w.detach()[expert], g.narrow(0, first, count));
      expect_near(output.detach().narrow(0, first, count), forward.output(), kFp32);
      expect_near(x.grad().narrow(0, first, count), forward.of_input(), kFp32);
      expect_near(w.grad()[expert], forward.of_weight(), kFp32);
    });
    for (size_t expert = 0; expert < rows.size(); ++expert) {
      const at::Tensor own = w.grad()[static_cast<int64_t>(expert)];
      if (rows[expert] == 0) EXPECT_EQ(own.count_nonzero().item<int64_t>(), 0) << expert;
    }
  }

  /// Of x and g over the rows of experts, and of all w.
  std::array<double, 3> largest() const {
    std::array<double, 3> found = {};
    for_experts([&](int64_t /*expert*/, int64_t first, int64_t count) {
      const at::Tensor operands[] = {x.narrow(0, first, count), w, g.narrow(0, first, count)};
      for (size_t i = 0; i < 3; ++i)
        found[i] = std::max(found[i], operands[i].detach().abs().max().item<double>());
    });
    return found;
  }
};

std::shared_ptr<const Fp8Layer> experts_of(Fp8Scaling& scaling) {
  return scaling.add_experts("experts.weight", at::empty({4, kOut, kIn}));
}

double most_of_gradients(Fp8Format format) { return format == Fp8Format::hybrid ? kE5m2 : kE4m3; }

/// The first step of delayed scaling, too.
TEST(Fp8Experts, EachExpertHasScalesOfItsOwnRows) {
  for (const Fp8Format format : {Fp8Format::hybrid, Fp8Format::e4m3})
    for (const Fp8Recipe recipe : {Fp8Recipe::delayed, Fp8Recipe::tensorwise}) {
      const auto scaling = scaling_of(options(recipe, format));
      ExpertUse use(kRows, 1);
      use.run(experts_of(*scaling));
      use.expect([&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& g) {
        const double most = most_of_gradients(format);
        return Operands{rounded(x, scale_of(x, kE4m3), kE4m3),
                        rounded(w, scale_of(w, kE4m3), kE4m3), rounded(g, scale_of(g, most), most)};
      });
    }
}

TEST(Fp8Experts, LaterStepsHaveTheScalesOfAllExpertsOfTheStepBefore) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = experts_of(*scaling);
  std::vector<ExpertUse> steps;
  for (const std::vector<int64_t>& rows :
       {kRows, std::vector<int64_t>{0, 7, 1, 32}, std::vector<int64_t>{40, 0, 0, 0}}) {
    ExpertUse& use = steps.emplace_back(rows, 10 * steps.size());
    use.run(layer);
    Fp8Scaling::end_step({scaling}, one_process());
    if (steps.size() == 1) continue;
    std::array<double, 3> largest = {};
    for (size_t step = 0; step + 1 < steps.size(); ++step)
      for (size_t i = 0; i < 3; ++i) largest[i] = std::max(largest[i], steps[step].largest()[i]);
    use.expect([&](const at::Tensor& x, const at::Tensor& w, const at::Tensor& g) {
      return Operands{rounded(x, kE4m3 / largest[0], kE4m3), rounded(w, kE4m3 / largest[1], kE4m3),
                      rounded(g, kE5m2 / largest[2], kE5m2)};
    });
  }
}

TEST(Fp8Experts, WithScalesOfRowsEachProductHasThoseThatItMultiplies) {
  const auto scaling = scaling_of(options(Fp8Recipe::rowwise, Fp8Format::e4m3));
  ExpertUse use(kRows, 1);
  use.run(experts_of(*scaling));
  const auto by_columns = [](const at::Tensor& z) {
    return rounded_rows(z.t().contiguous(), kE4m3).t();
  };
  use.for_experts([&](int64_t expert, int64_t first, int64_t count) {
    SCOPED_TRACE(expert);
    const at::Tensor x = use.x.detach().narrow(0, first, count), w = use.w.detach()[expert];
    const at::Tensor g = use.g.narrow(0, first, count);
    expect_near(use.output.detach().narrow(0, first, count),
                rounded_rows(x, kE4m3).mm(rounded_rows(w, kE4m3).t()), kFp32);
    expect_near(use.x.grad().narrow(0, first, count), rounded_rows(g, kE4m3).mm(by_columns(w)),
                kFp32);
    expect_near(use.w.grad()[expert], by_columns(g).t().mm(by_columns(x)), kFp32);
  });
}

TEST(Fp8Experts, OnlyTrainingCountsForTheScales) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = experts_of(*scaling);
  ExpertUse use(kRows, 1);
  {
    const at::NoGradGuard no_grad;
    grouped_linear(use.x, use.w, groups_with(kRows), layer);
  }
  Fp8Scaling::end_step({scaling}, one_process());
  EXPECT_TRUE(scaling->state().front().scales.eq(1).all().item<bool>());
  EXPECT_EQ(scaling->state().front().parameter, "experts.weight");
}

TEST(Fp8Experts, WithoutRowsOnlyTheWeightsAreNoted) {
  const auto scaling = scaling_of(options(Fp8Recipe::delayed));
  const auto layer = experts_of(*scaling);
  ExpertUse use({0, 0, 0, 0}, 1);
  use.run(layer);
  EXPECT_EQ(use.w.grad().count_nonzero().item<int64_t>(), 0);
  Fp8Scaling::end_step({scaling}, one_process());
  const at::Tensor scales = scaling->state().front().scales;
  const double of_weight = scale_of(use.w.detach(), kE4m3);
  expect_near(scales, at::tensor({1.0, of_weight, 1.0}, at::kDouble), 1e-6);
}

TEST(Fp8Experts, RefusesSizesOfAnExpertThatTheProductDoesNotTake) {
  Fp8Scaling scaling(options(Fp8Recipe::delayed), c10::kCPU, one_process());
  // All experts together would have rows enough.
  EXPECT_TRUE(throws_with<ConfigError>(
      [&] {
        scaling.add_experts("mlp.experts.linear_fc1.weight", at::empty({4, 2, 20, 32}));
      },
      "train.fp8: found hybrid, but one expert of mlp.experts.linear_fc1.weight is 40 x 32 on a "
      "rank "
      "of etp; allowed with it: multiples of 16"));
  scaling.add_experts("w", at::empty({1, 2, 8, 16}));
}

}  // namespace
}  // namespace lockstep
