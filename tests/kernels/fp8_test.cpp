// 8-bit floats compared with their definition: every number of both formats, every rounding, and
// products of the numbers in fp64.

#include "lockstep/kernels/fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"

namespace lockstep::kernels {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr at::ScalarType kFormats[] = {at::kFloat8_e4m3fn, at::kFloat8_e5m2};

/// The number for a code, by OCP's "8-bit floating point specification": sign, exponent, mantissa.
/// e4m3 has no infinities, and one NaN for each sign.
double number(uint8_t code, at::ScalarType format) {
  const bool wide = format == at::kFloat8_e5m2;
  const int mantissa_bits = wide ? 2 : 3, bias = wide ? 15 : 7;
  const double sign = code & 0x80 ? -1 : 1;
  const int exponent = (code & 0x7f) >> mantissa_bits;
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  if (wide && exponent == 31) return mantissa == 0 ? sign * kInfinity : kNan;
  if (!wide && (code & 0x7f) == 0x7f) return kNan;
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - mantissa_bits);
  return sign * std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

std::vector<double> finite_numbers(at::ScalarType format) {
  std::vector<double> numbers;
  for (int code = 0; code < 256; ++code)
    if (const double x = number(static_cast<uint8_t>(code), format); std::isfinite(x))
      numbers.push_back(x);
  return numbers;
}

/// The nearest finite number; in a tie, the one with the even code.
double nearest(double x, at::ScalarType format) {
  double best = kNan, distance = kInfinity;
  bool even = false;
  for (int code = 0; code < 256; ++code) {
    const double candidate = number(static_cast<uint8_t>(code), format);
    if (!std::isfinite(candidate)) continue;
    const double apart = std::abs(candidate - x);
    if (apart < distance || (apart == distance && !even && code % 2 == 0)) {
      best = candidate;
      distance = apart;
      even = code % 2 == 0;
    }
  }
  return best;
}

at::Tensor numbers_of(const Fp8Matrix& matrix) {
  const at::Tensor codes = matrix.values.view(at::kByte).contiguous();
  const at::Tensor numbers = at::empty(codes.sizes(), at::kDouble);
  const auto* const code = codes.const_data_ptr<uint8_t>();
  auto* const value = numbers.mutable_data_ptr<double>();
  for (int64_t i = 0; i < codes.numel(); ++i)
    value[i] = number(code[i], matrix.values.scalar_type());
  return numbers;
}

at::Tensor values_of(const Fp8Matrix& matrix) {
  return numbers_of(matrix) * matrix.inverse_scales.to(at::kDouble);
}

at::Tensor one(double x) { return at::full({1, 1}, x, at::kFloat); }

at::Tensor noise(at::IntArrayRef shape, uint64_t seed) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kFloat);
}

TEST(Fp8, RoundsToTheNearestNumberTiesToEven) {
  for (const at::ScalarType format : kFormats) {
    const std::vector<double> numbers = finite_numbers(format);
    std::vector<float> given;
    for (const double x : numbers)
      for (const double y : numbers) {
        if (std::abs(x - y) > std::abs(x) / 2 + 1e-3) continue;
        const double middle = (x + y) / 2;
        for (const double z : {middle, middle * (1 + 1e-6), middle * (1 - 1e-6)})
          given.push_back(static_cast<float>(z));
      }
    const at::Tensor x = at::tensor(given).view({1, -1});
    const at::Tensor found = numbers_of(to_fp8(x, format, one(1)));
    for (size_t i = 0; i < given.size(); ++i)
      ASSERT_EQ(found.const_data_ptr<double>()[i], nearest(given[i], format)) << given[i];
  }
}

TEST(Fp8, WhatIsTooLargeBecomesTheLargestNumberAndWhatIsNotFiniteNan) {
  for (const at::ScalarType format : kFormats) {
    const float most = format == at::kFloat8_e5m2 ? 57344 : 448;
    const at::Tensor x =
        at::tensor({most * 1.01F, -most * 9, 3e38F, std::numeric_limits<float>::infinity(),
                    -std::numeric_limits<float>::infinity(), std::nanf("")})
            .view({1, 6});
    const at::Tensor found = numbers_of(to_fp8(x, format, one(1)));
    const auto* const value = found.const_data_ptr<double>();
    const std::vector<double> expected = {most, -most, most};
    for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(value[i], expected[i]) << i;
    for (size_t i = expected.size(); i < 6; ++i) EXPECT_TRUE(std::isnan(value[i])) << i;
    // A finite value that overflows when scaled.
    EXPECT_EQ(numbers_of(to_fp8(x.narrow(1, 2, 1), format, one(1e9))).item<double>(), most);
  }
}

TEST(Fp8, AScaleMapsTheLargestValueToTheLargestNumber) {
  const at::Tensor x = noise({7, 32}, 3).to(at::kBFloat16);
  const at::Tensor largest = largest_absolute(x);
  EXPECT_EQ(largest.item<double>(), x.abs().max().item<double>());
  for (const at::ScalarType format : kFormats) {
    const double most = format == at::kFloat8_e5m2 ? 57344 : 448;
    for (const int64_t margin : {0, 3}) {
      const at::Tensor scale = fp8_scale(largest, format, margin);
      EXPECT_NEAR(scale.item<double>() * largest.item<double>() * std::exp2(margin) / most, 1,
                  1e-6);
      const double relative = format == at::kFloat8_e5m2 ? 1.0 / 8 : 1.0 / 16;
      const at::Tensor exact = x.to(at::kDouble);
      const at::Tensor apart = (values_of(to_fp8(x, format, scale)) - exact).abs();
      EXPECT_TRUE((apart <= exact.abs() * relative * (1 + 1e-6) + 1e-4).all().item<bool>());
    }
  }
}

TEST(Fp8, OfAnUnusableLargestValueTheScaleIsOne) {
  for (const double x : {0.0, kInfinity, kNan})
    EXPECT_EQ(fp8_scale(one(x), at::kFloat8_e4m3fn).item<double>(), 1) << x;
  // The smallest number of fp32 would need a scale beyond its largest one.
  const at::Tensor scale = fp8_scale(one(1e-45), at::kFloat8_e5m2);
  EXPECT_TRUE(std::isnormal(scale.item<float>()));
  EXPECT_TRUE(std::isnormal(scale.reciprocal().item<float>()));
}

TEST(Fp8, NanIsTheLargestAbsoluteValue) {
  const at::Tensor x = noise({3, 16}, 1);
  x[1][5] = kNan;
  EXPECT_TRUE(std::isnan(largest_absolute(x).item<double>()));
  const at::Tensor rows = largest_absolute_of_rows(x);
  EXPECT_EQ(rows.sizes(), (at::IntArrayRef{3, 1}));
  EXPECT_TRUE(std::isnan(rows[1].item<double>()));
  EXPECT_EQ(rows[2].item<double>(), x[2].abs().max().item<double>());
}

TEST(Fp8, AProductIsThatOfTheNumbers) {
  const at::Tensor bias = noise({48}, 9);
  for (const at::ScalarType format : kFormats)
    for (const bool rows : {false, true})
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16}) {
        const at::Tensor x = noise({5, 64}, 1), y = noise({48, 64}, 2);
        const auto narrowed = [&](const at::Tensor& z, at::ScalarType f) {
          return to_fp8(z, f,
                        fp8_scale(rows ? largest_absolute_of_rows(z) : largest_absolute(z), f));
        };
        const Fp8Matrix a = narrowed(x, format), b = narrowed(y, at::kFloat8_e4m3fn);
        const at::Tensor exact = values_of(a).mm(values_of(b).t());
        for (const bool biased : {false, true}) {
          const auto with = biased ? std::optional(bias.to(dtype)) : std::nullopt;
          const at::Tensor found = scaled_mm(a, b, with, dtype, true);
          EXPECT_EQ(found.scalar_type(), dtype);
          const at::Tensor expected = biased ? exact + with->to(at::kDouble) : exact;
          const double bound = dtype == at::kFloat ? 1e-5 : 0.005;
          EXPECT_LT((found.to(at::kDouble) - expected).abs().max().item<double>(),
                    bound * expected.abs().max().item<double>());
        }
      }
}

TEST(Fp8, TheTransposedMatrixHasTheSameNumbers) {
  const at::Tensor x = noise({6, 32}, 4);
  const Fp8Matrix expected = to_fp8(x, at::kFloat8_e4m3fn, one(17));
  const Fp8Matrices both = to_fp8_matrices(x, at::kFloat8_e4m3fn, one(17), Fp8Sides::both);
  EXPECT_TRUE(both.transposed.values.is_contiguous());
  EXPECT_TRUE(at::equal(values_of(both.matrix), values_of(expected)));
  EXPECT_TRUE(at::equal(values_of(both.transposed), values_of(expected).t()));
  for (const bool transposed : {false, true}) {
    const Fp8Matrices alone = to_fp8_matrices(x.t().contiguous().t(), at::kFloat8_e4m3fn, one(17),
                                              transposed ? Fp8Sides::transposed : Fp8Sides::matrix);
    EXPECT_EQ(alone.matrix.values.defined(), !transposed);
    EXPECT_EQ(alone.transposed.values.defined(), transposed);
    EXPECT_TRUE(at::equal(values_of(transposed ? alone.transposed : alone.matrix),
                          transposed ? values_of(expected).t() : values_of(expected)));
  }
}

TEST(Fp8, EachSideMayHaveScalesOfItsRows) {
  const at::Tensor x = noise({6, 32}, 4);
  const at::Tensor of_rows = fp8_scale(largest_absolute_of_rows(x), at::kFloat8_e4m3fn);
  const at::Tensor of_columns = fp8_scale(largest_absolute_of_columns(x), at::kFloat8_e4m3fn);
  ASSERT_EQ(of_columns.sizes(), (at::IntArrayRef{32, 1}));
  EXPECT_TRUE(at::equal(largest_absolute_of_columns(x), largest_absolute_of_rows(x.t())));
  const Fp8Matrix matrix = to_fp8_matrices(x, at::kFloat8_e4m3fn, of_rows, Fp8Sides::matrix).matrix;
  const Fp8Matrix turned =
      to_fp8_matrices(x, at::kFloat8_e4m3fn, of_columns, Fp8Sides::transposed).transposed;
  EXPECT_TRUE(at::equal(values_of(matrix), values_of(to_fp8(x, at::kFloat8_e4m3fn, of_rows))));
  EXPECT_TRUE(at::equal(values_of(turned),
                        values_of(to_fp8(x.t().contiguous(), at::kFloat8_e4m3fn, of_columns))));
  EXPECT_THROW(to_fp8_matrices(x, at::kFloat8_e4m3fn, of_rows, Fp8Sides::both), Error);
}

constexpr Fp8Sides kSides[] = {Fp8Sides::matrix, Fp8Sides::transposed, Fp8Sides::both};

TEST(Fp8, WithoutElementsTheLargestValueIsZeroAndTheMatricesAreEmpty) {
  for (const auto& [rows, width] : {std::pair<int64_t, int64_t>{0, 32}, {16, 0}, {0, 0}})
    for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble}) {
      const at::Tensor x = at::empty({rows, width}, dtype);
      EXPECT_TRUE(at::equal(largest_absolute(x), one(0)));
      EXPECT_TRUE(at::equal(largest_absolute_of_rows(x), at::zeros({rows, 1}, at::kFloat)));
      EXPECT_TRUE(at::equal(largest_absolute_of_columns(x), at::zeros({width, 1}, at::kFloat)));
      for (const Fp8Sides sides : kSides) {
        const at::Tensor largest = one(3);
        const Fp8Matrices found = to_fp8_matrices(x, at::kFloat8_e4m3fn, one(2), sides, largest);
        EXPECT_EQ(largest.item<double>(), 3);
        if (sides != Fp8Sides::transposed) {
          EXPECT_EQ(found.matrix.values.sizes(), (at::IntArrayRef{rows, width}));
        }
        if (sides != Fp8Sides::matrix) {
          EXPECT_EQ(found.transposed.values.sizes(), (at::IntArrayRef{width, rows}));
        }
      }
    }
}

TEST(Fp8, OfFp64TheNumbersAreThoseOfFp32) {
  const at::Tensor x = noise({6, 32}, 4), wide = x.to(at::kDouble);
  EXPECT_TRUE(at::equal(largest_absolute(wide), largest_absolute(x)));
  EXPECT_TRUE(at::equal(largest_absolute_of_rows(wide), largest_absolute_of_rows(x)));
  EXPECT_TRUE(at::equal(largest_absolute_of_columns(wide), largest_absolute_of_columns(x)));
  const Fp8Matrix expected = to_fp8(x, at::kFloat8_e4m3fn, one(16));  // products in fp32 are exact
  for (const Fp8Sides sides : kSides) {
    const at::Tensor largest = one(0);
    const Fp8Matrices found = to_fp8_matrices(wide, at::kFloat8_e4m3fn, one(16), sides, largest);
    EXPECT_TRUE(at::equal(largest, largest_absolute(x)));
    if (sides != Fp8Sides::transposed) {
      EXPECT_TRUE(at::equal(values_of(found.matrix), values_of(expected)));
    }
    if (sides != Fp8Sides::matrix) {
      EXPECT_TRUE(at::equal(values_of(found.transposed), values_of(expected).t()));
    }
  }
}

TEST(Fp8, TheLargestValueIsRaised) {
  const at::Tensor x = noise({16, 32}, 4);
  const double own = x.abs().max().item<double>();
  for (const double before : {0.0, own / 2, own * 2, kInfinity}) {
    const at::Tensor largest = one(before);
    to_fp8_matrices(x, at::kFloat8_e5m2, one(1), Fp8Sides::matrix, largest);
    EXPECT_EQ(largest.item<double>(), std::max<double>(static_cast<float>(before), own));
  }
  const at::Tensor largest = one(own);
  x[3][7] = kNan;
  to_fp8_matrices(x, at::kFloat8_e5m2, one(1), Fp8Sides::transposed, largest);
  EXPECT_TRUE(std::isnan(largest.item<double>()));
}

}  // namespace
}  // namespace lockstep::kernels
