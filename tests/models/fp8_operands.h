#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/models/fp8_scaling.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/parallel_state/parallel_state.h"

/// Operands of linear layers in 8-bit floats, rounded in fp64 by the definition of the formats.
namespace lockstep::testing {

inline constexpr int64_t kIn = 32, kOut = 48;
inline constexpr double kE4m3 = 448, kE5m2 = 57344;

/// `values` times `scale`, limited to `most` and rounded to the format's mantissa, and scaled back.
inline at::Tensor rounded(const at::Tensor& values, double scale, double most) {
  const bool wide = most == kE5m2;
  const int mantissa = wide ? 2 : 3, lowest = wide ? -14 : -6;
  const at::Tensor result = values.to(at::kDouble).clone().contiguous();
  auto* const x = result.mutable_data_ptr<double>();
  // A scale, and its product with a value, have fp32 precision.
  const auto narrow_scale = static_cast<float>(scale);
  for (int64_t i = 0; i < result.numel(); ++i) {
    double y = static_cast<float>(x[i]) * narrow_scale;
    y = std::min(std::max(y, -most), most);
    const int exponent = y == 0 ? lowest : std::max(std::ilogb(y), lowest);
    const double unit = std::ldexp(1.0, exponent - mantissa);
    x[i] = std::nearbyint(y / unit) * unit / narrow_scale;
  }
  return result;
}

inline double scale_of(const at::Tensor& x, double most) {
  return most / x.abs().max().item<double>();
}

/// The same with a scale for each row.
inline at::Tensor rounded_rows(const at::Tensor& x, double most) {
  std::vector<at::Tensor> rows;
  for (const at::Tensor& row : x.unbind(0)) rows.push_back(rounded(row, scale_of(row, most), most));
  return at::stack(rows);
}

inline at::Tensor noise(at::IntArrayRef shape, uint64_t seed, double size = 1) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return (at::randn(shape, generator, at::kDouble) * size).to(at::kBFloat16);
}

inline void expect_near(const at::Tensor& found, const at::Tensor& expected, double bound) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_LT((found.to(at::kDouble) - expected).abs().max().item<double>(),
            bound * expected.abs().max().item<double>());
}

inline constexpr double kBf16 = 0.005;

inline ProcessGroup one_process() {
  return ParallelState::single_process().group(GroupKind::tp_dp_cp);
}

inline std::shared_ptr<Fp8Scaling> scaling_of(const Fp8Options& options,
                                              const ProcessGroup& sharing = one_process()) {
  return std::make_shared<Fp8Scaling>(options, c10::kCPU, sharing);
}

/// The operands of a layer's products.
struct Operands {
  at::Tensor x, w, g;

  at::Tensor output() const { return x.mm(w.t()); }
  at::Tensor of_input() const { return g.mm(w); }
  at::Tensor of_weight() const { return g.t().mm(x); }
};

/// One use of a layer with `x`, `w` and the gradient `g` of its output.
struct Use {
  at::Tensor x, w, g, bias = {};
  at::Tensor output = {};

  Use(at::Tensor of_x, at::Tensor of_w, at::Tensor of_g)
      : x(std::move(of_x)), w(std::move(of_w)), g(std::move(of_g)) {
    x.requires_grad_(true);
    w.requires_grad_(true);
  }
  void run(const std::shared_ptr<const Fp8Layer>& layer) {
    output = parallel_linear(
        x, w, bias,
        {.group = ParallelState::single_process().world(), .fp8 = layer, .label = "layer"});
    output.backward(g);
  }
};

inline Fp8Options options(Fp8Recipe recipe, Fp8Format format = Fp8Format::hybrid) {
  Fp8Options result;
  result.format = format;
  result.recipe = recipe;
  result.amax_history_len = 3;
  return result;
}

}  // namespace lockstep::testing
