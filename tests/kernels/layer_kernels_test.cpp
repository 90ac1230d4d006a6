// Layer operations compared with PyTorch's in double: every dtype, widths that are not a multiple
// of a vector, unaligned starts, inputs with gaps.

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "lockstep/core/error.h"
#include "lockstep/kernels/norm.h"
#include "lockstep/kernels/rotary.h"
#include "lockstep/kernels/swiglu.h"
#include "lockstep/tests/kernels/layer_inputs.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::kernels {
namespace {

using Several = std::vector<at::Tensor>;

constexpr double kEpsilon = 1e-5;

at::Tensor leaf(const at::Tensor& x) { return x.detach().to(at::kDouble).requires_grad_(true); }

double error_of(const at::Tensor& found, const at::Tensor& exact) {
  if (exact.numel() == 0) return 0;
  return (found.detach().to(at::kDouble) - exact.detach()).abs().max().item<double>();
}

/// One rounding of a number of size 8; several in fp64 and fp32.
double tolerance(at::ScalarType dtype) {
  if (dtype == at::kDouble) return 1e-13;
  return dtype == at::kFloat ? 2e-5 : dtype == at::kHalf ? 0.005 : 0.04;
}

/// The same values, with a gap after each.
at::Tensor with_gaps(const at::Tensor& x) {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.push_back(2);
  return at::empty(shape, x.options()).select(-1, 0).copy_(x);
}

at::Tensor plain_norm(NormKind kind, const at::Tensor& x, const at::Tensor& weight,
                      const at::Tensor& bias) {
  if (kind == NormKind::rms) return at::rms_norm(x, weight.sizes(), weight, kEpsilon);
  return at::layer_norm(x, weight.sizes(), weight, bias, kEpsilon);
}

/// Forward and backward of `x` and `residual` [rows, width], compared with autograd in double.
void expect_norm(NormKind kind, const at::Tensor& x, const at::Tensor& residual) {
  const at::ScalarType dtype = x.scalar_type();
  const int64_t width = x.size(1);
  const at::Tensor weight = wave_of({width}, 0.1, dtype), bias = wave_of({width}, 0.4, dtype);
  const at::Tensor grad = wave_of(x.sizes(), 0.8, dtype), sum_grad = wave_of(x.sizes(), 2, dtype);
  const NormResult found = norm_forward(kind, x, residual, weight, bias, kEpsilon);
  const NormGradients gradients = norm_backward(kind, grad, sum_grad, found, weight, true);

  // The oracle starts from the rounded sum, as all later operations do.
  const Several exact = {leaf(found.sum), leaf(weight), leaf(bias)};
  const at::Tensor normalized = plain_norm(kind, exact[0], exact[1], exact[2]);
  normalized.backward(grad.to(at::kDouble));
  const double bound = tolerance(dtype);
  if (residual.defined()) {
    EXPECT_TRUE(at::equal(found.sum, x + residual));
  }
  EXPECT_EQ(found.normalized.scalar_type(), dtype);
  EXPECT_LT(error_of(found.normalized, normalized), bound);
  const double steep = 1 + exact[0].grad().abs().max().item<double>();
  EXPECT_LT(error_of(gradients.input, exact[0].grad() + sum_grad.to(at::kDouble)), bound * steep);
  // Sums over the rows, at least in fp32.
  const double sums = (dtype == at::kDouble ? 1e-13 : 2e-6) * static_cast<double>(1 + x.numel());
  EXPECT_LT(error_of(gradients.weight, exact[1].grad()), sums);
  EXPECT_EQ(gradients.bias.defined(), kind == NormKind::layer);
  if (kind == NormKind::layer) {
    EXPECT_LT(error_of(gradients.bias, exact[2].grad()), sums);
  }
}

TEST(NormKernel, EqualsPyTorchInDouble) {
  for (const auto kind : {NormKind::rms, NormKind::layer})
    for (const auto dtype : kDtypes)
      for (const int64_t width : {5, 7, 16, 33, 130})
        for (const int64_t rows : {1, 5, 40, 200}) {
          SCOPED_TRACE(::testing::Message()
                       << at::toString(dtype) << " " << rows << " x " << width);
          const at::Tensor x = wave_of({rows, width}, 1, dtype);
          expect_norm(kind, x, wave_of({rows, width}, 3, dtype));
          expect_norm(kind, misaligned(x), {});
          expect_norm(kind, with_gaps(x), x);
        }
}

TEST(NormKernel, TakesNoRowsAndSpreadGradients) {
  for (const auto kind : {NormKind::rms, NormKind::layer}) {
    const at::Tensor weight = wave_of({8}, 0), bias = wave_of({8}, 1);
    const at::Tensor none = at::empty({3, 0, 8}, at::kDouble);
    const NormResult empty = norm_forward(kind, none, none, weight, bias, kEpsilon);
    EXPECT_EQ(empty.normalized.sizes(), none.sizes());
    const NormGradients of_none = norm_backward(kind, none, {}, empty, weight, true);
    EXPECT_TRUE(at::equal(of_none.weight, at::zeros({8}, at::kDouble)));

    const at::Tensor x = wave_of({2, 3, 8}, 2);
    const NormResult found = norm_forward(kind, x, {}, weight, bias, kEpsilon);
    EXPECT_TRUE(found.sum.is_same(x));
    const at::Tensor one = at::ones({}, at::kDouble).expand({2, 3, 8});  // gradient of a sum()
    EXPECT_TRUE(
        at::equal(norm_backward(kind, one, one, found, weight, false).input,
                  norm_backward(kind, one.clone(), one.clone(), found, weight, false).input));
    EXPECT_FALSE(norm_backward(kind, one, {}, found, weight, false).weight.defined());
  }
}

TEST(NormKernel, WeightsMayBeWiderThanActivations) {
  const at::Tensor x = wave_of({6, 40}, 1, at::kBFloat16), weight = wave_of({40}, 2, at::kFloat);
  const at::Tensor bias = wave_of({40}, 3, at::kFloat);
  for (const auto kind : {NormKind::rms, NormKind::layer}) {
    const NormResult found = norm_forward(kind, x, {}, weight, bias, kEpsilon);
    EXPECT_EQ(found.normalized.scalar_type(), at::kBFloat16);
    EXPECT_EQ(found.root.scalar_type(), at::kFloat);
    const at::Tensor exact = plain_norm(kind, x.to(at::kFloat), weight, bias).to(at::kBFloat16);
    EXPECT_LE(error_of(found.normalized, exact.to(at::kDouble)), 1.0 / 16);
  }
}

TEST(NormKernel, EveryNumberOfThreadsGivesTheSameBits) {
  const at::Tensor x = wave_of({3001, 64}, 1, at::kFloat), weight = wave_of({64}, 2, at::kFloat);
  const int threads = at::get_num_threads();
  Several first;
  for (const int count : {1, 2, 3}) {
    at::set_num_threads(count);
    const NormResult found = norm_forward(NormKind::layer, x, x, weight, weight, kEpsilon);
    const NormGradients gradients = norm_backward(NormKind::layer, x, x, found, weight, true);
    const Several all = {found.normalized, gradients.input, gradients.weight, gradients.bias};
    if (first.empty()) first = all;
    for (size_t i = 0; i < all.size(); ++i) EXPECT_TRUE(at::equal(all[i], first[i])) << i;
  }
  at::set_num_threads(threads);
}

at::Tensor plain_swiglu(const at::Tensor& inner) {
  const auto halves = inner.chunk(2, -1);
  return at::silu(halves[0]) * halves[1];
}

/// `steepest`: the largest result and gradient; roundings are relative to it.
void expect_swiglu(const at::Tensor& inner, double steepest = 8) {
  const at::ScalarType dtype = inner.scalar_type();
  const at::Tensor exact = leaf(inner), expected = plain_swiglu(exact);
  const at::Tensor grad = wave_of(expected.sizes(), 0.3, dtype);
  expected.backward(grad.to(at::kDouble));
  const double bound = tolerance(dtype) * steepest / 8;
  EXPECT_LT(error_of(swiglu(inner), expected), bound);
  EXPECT_LT(error_of(swiglu_backward(grad, inner), exact.grad()), 3 * bound);
}

TEST(SwigluKernel, EqualsPyTorchInDouble) {
  for (const auto dtype : kDtypes)
    for (const int64_t width : {1, 7, 16, 33, 130})
      for (const int64_t rows : {0, 1, 5}) {
        SCOPED_TRACE(::testing::Message() << at::toString(dtype) << " " << rows << " x " << width);
        const at::Tensor inner = wave_of({rows, 2 * width}, 1, dtype);
        expect_swiglu(inner);
        expect_swiglu(misaligned(inner));
        expect_swiglu(with_gaps(inner));
      }
  expect_swiglu(wave_of({2, 3, 10}, 1));
}

TEST(SwigluKernel, LargeGatesDoNotOverflow) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto dtype : {at::kDouble, at::kFloat}) {
    const at::Tensor gate = at::tensor({-1e4, -750.0, -100.0, -1e-9, 0.0, 30.0, 800.0, 1e4}, dtype);
    const at::Tensor inner = at::cat({gate, at::ones_like(gate)}).unsqueeze(0);
    const at::Tensor found = swiglu(inner), of_inner = swiglu_backward(at::ones_like(found), inner);
    EXPECT_TRUE(at::allclose(found, at::silu(gate).unsqueeze(0), 1e-6, 1e-30)) << found;
    EXPECT_TRUE(of_inner.isfinite().all().item<bool>()) << of_inner;
  }
  const at::Tensor broken =
      at::tensor({std::nan(""), infinity, 1.0, 1.0}, at::kDouble).view({1, 4});
  EXPECT_TRUE(std::isnan(swiglu(broken)[0][0].item<double>()));
  EXPECT_EQ(swiglu(broken)[0][1].item<double>(), infinity);
}

TEST(SwigluKernel, RefusesWhatItCannotServe) {
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] {
        swiglu(at::ones({2, 3}));
      },
      "swiglu: found rows of 3"));
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] {
        swiglu(at::ones({2, 4}, at::kLong));
      },
      "swiglu: found tensors of Long, allowed: Float"));
}

/// Mean errors of libtorch's norms and swiglu, and of ours, in `dtype` against double.
TEST(LayerKernels, NarrowDtypesAreNoLessExactThanPyTorchs) {
  for (const auto dtype : {at::kBFloat16, at::kHalf}) {
    const auto mean_error = [](const at::Tensor& found, const at::Tensor& exact) {
      return (found.to(at::kDouble) - exact).abs().mean().item<double>();
    };
    const at::Tensor x = wave_of({64, 96}, 1, dtype), weight = wave_of({96}, 2, dtype);
    const at::Tensor bias = wave_of({96}, 3, dtype);
    for (const auto kind : {NormKind::rms, NormKind::layer}) {
      const at::Tensor exact =
          plain_norm(kind, x.to(at::kDouble), weight.to(at::kDouble), bias.to(at::kDouble));
      EXPECT_LE(mean_error(norm_forward(kind, x, {}, weight, bias, kEpsilon).normalized, exact),
                1.001 * mean_error(plain_norm(kind, x, weight, bias), exact));
    }
    const at::Tensor exact = plain_swiglu(x.to(at::kDouble));
    EXPECT_LE(mean_error(swiglu(x), exact), mean_error(plain_swiglu(x), exact));
  }
}

struct RotaryCase {
  int64_t groups, heads, channels, rotated;
  QueryRange queries;
};

RotaryTable table_of(int64_t rotated, at::ScalarType dtype, bool permuted) {
  const at::Tensor angles =
      at::outer(at::arange(9, at::kDouble), at::pow(0.3, at::arange(rotated / 2, at::kDouble)));
  const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
  return {angles.cos().to(wide), angles.sin().to(wide),
          permuted ? at::tensor({8, 0, 3, 3, 5}, at::kLong) : at::Tensor()};
}

/// The rotation as a product of complex numbers.
at::Tensor plain_rotation(const at::Tensor& heads, const RotaryTable& table) {
  const int64_t half = table.cos.size(1);
  at::Tensor rows =
      table.positions.defined() ? table.positions : at::arange(heads.size(0), at::kLong);
  if (rows.dim() == 1) rows = rows.unsqueeze(1).expand({heads.size(0), heads.size(1)});
  const at::Tensor turn = at::complex(table.cos.to(at::kDouble), table.sin.to(at::kDouble))
                              .index_select(0, rows.flatten())
                              .view({heads.size(0), heads.size(1), 1, half});
  const at::Tensor turned =
      at::complex(heads.slice(3, 0, half), heads.slice(3, half, 2 * half)) * turn;
  return at::cat({at::real(turned), at::imag(turned), heads.slice(3, 2 * half)}, 3);
}

void expect_rotary(const RotaryCase& shape, at::ScalarType dtype, bool permuted, bool apart) {
  RotaryTable table = table_of(shape.rotated, dtype, permuted);
  if (apart)  // each sample has its own positions
    table.positions = at::tensor({0, 1, 2, 0, 1, 8, 0, 3, 1, 2}, at::kLong).view({2, 5}).t();
  const at::Tensor packed =
      wave_of({5, 2, shape.groups, shape.heads + 2, shape.channels}, 1, dtype);
  const at::Tensor exact = leaf(packed);
  const auto parts = exact.split_with_sizes({shape.heads, 1, 1}, 3);
  const Several expected = {
      plain_rotation(parts[0].narrow(3, shape.queries.first, shape.queries.count).flatten(2, 3),
                     table),
      plain_rotation(parts[1].squeeze(3), table), parts[2].squeeze(3)};
  const AttentionHeads found = rotate_heads(packed, table, shape.queries);
  AttentionHeads grads = {wave_of(expected[0].sizes(), 2, dtype),
                          wave_of(expected[1].sizes(), 3, dtype),
                          wave_of(expected[2].sizes(), 4, dtype)};
  const Several all = {grads.query, grads.key, grads.value};
  for (size_t i = 0; i < all.size(); ++i)
    expected[i].backward(all[i].to(at::kDouble), /*retain_graph=*/true);
  const at::Tensor& oracle = exact.grad();
  const double bound = tolerance(dtype);
  EXPECT_LT(error_of(found.query, expected[0]), bound);
  EXPECT_LT(error_of(found.key, expected[1]), bound);
  EXPECT_EQ(error_of(found.value, expected[2]), 0);
  EXPECT_LT(error_of(rotate_heads_backward(grads, table, shape.queries, shape.heads), oracle),
            bound);
  // Laid out as attention returns them: [batch, heads, sequence, channels] in memory, with gaps.
  grads.query = grads.query.permute({1, 2, 0, 3}).contiguous().permute({2, 0, 1, 3});
  grads.key = with_gaps(grads.key);
  grads.value = at::cat({grads.value, grads.value}, 2).narrow(2, 0, shape.groups);
  EXPECT_LT(error_of(rotate_heads_backward(grads, table, shape.queries, shape.heads), oracle),
            bound);
}

TEST(RotaryKernel, EqualsAProductOfComplexNumbers) {
  for (const auto dtype : kDtypes)
    for (const bool permuted : {false, true})
      for (const RotaryCase& shape :
           {RotaryCase{3, 1, 8, 8, {0, 1}}, RotaryCase{2, 3, 6, 4, {0, 3}},
            RotaryCase{1, 4, 34, 34, {1, 2}}, RotaryCase{1, 2, 5, 2, {1, 1}}}) {
        SCOPED_TRACE(::testing::Message() << at::toString(dtype) << " " << shape.channels
                                          << " channels, permuted " << permuted);
        for (const bool apart : {false, true}) expect_rotary(shape, dtype, permuted, apart);
      }
}

TEST(RotaryKernel, RefusesSequencesThatTheTableEndsBefore) {
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [] {
        rotate_heads(at::ones({10, 1, 1, 3, 4}), table_of(4, at::kFloat, false), {0, 1});
      },
      "rotary: found a sequence of 10, allowed: 9 positions"));
  RotaryTable table = table_of(4, at::kFloat, true);
  table.positions = table.positions.unsqueeze(1).expand({5, 3});
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] {
        rotate_heads(at::ones({5, 2, 1, 3, 4}), table, {0, 1});
      },
      "rotary: found positions 5 x 3, allowed: 5 or 5 x 2"));
}

/// On the CPU only: reading positions on a device would wait for it.
TEST(RotaryKernel, RefusesPositionsBeyondTheTableAndOfAnotherDtype) {
  RotaryTable table = table_of(4, at::kFloat, true);
  const auto rotate = [&](const at::Tensor& positions) {
    table.positions = positions;
    rotate_heads(at::ones({5, 2, 1, 3, 4}), table, {0, 1});
  };
  rotate(at::full({5}, 8, at::kLong));
  for (const int64_t position : {int64_t{-1}, int64_t{9}, int64_t{1} << 40})
    EXPECT_TRUE(testing::throws_with<UsageError>(
        [&] { rotate(at::full({5}, position, at::kLong)); },
        "rotary: found position " + std::to_string(position) + ", allowed: 0 to 8"));
  for (const auto& [dtype, name] : {std::pair(at::kInt, "Int"), std::pair(at::kFloat, "Float")})
    EXPECT_TRUE(testing::throws_with<UsageError>(
        [&, dtype = dtype] { rotate(at::zeros({5}, dtype)); },
        std::string("rotary: found positions of ") + name + ", allowed: Long"));
}

}  // namespace
}  // namespace lockstep::kernels
