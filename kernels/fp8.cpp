#include "lockstep/kernels/fp8.h"

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/fp8_tensors.h"

namespace lockstep::kernels {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
/// The largest scale for which it and its inverse are normal numbers in fp32.
constexpr double kLargestScale = 0x1p100;

double largest_number(at::ScalarType format) { return format == at::kFloat8_e5m2 ? 57344 : 448; }

/// The largest absolute values along `dims`, fp32 [count, 1].
at::Tensor largest_along(const at::Tensor& x, at::OptionalIntArrayRef dims, int64_t count) {
  if (x.numel() == 0) return at::zeros({count, 1}, x.options().dtype(at::kFloat));
  // libtorch's norm has no dtype that is narrower than that of x.
  const at::ScalarType dtype = x.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  return at::linalg_vector_norm(x, kInfinity, dims, /*keepdim=*/false, dtype)
      .to(at::kFloat)
      .view({count, 1});
}

at::Tensor reference_mm(const Fp8Matrix& a, const Fp8Matrix& b,
                        const std::optional<at::Tensor>& bias) {
  at::Tensor product = at::mm(a.values.to(at::kFloat), b.values.to(at::kFloat).t());
  product.mul_(a.inverse_scales).mul_(b.inverse_scales.t());
  if (bias) product.add_(*bias);
  return product;
}

/// The bytes that kernels read at once.
constexpr uintptr_t kWordBytes = 16;

/// Whether the kernel of x's device accepts x.
bool has_kernel(const at::Tensor& x) {
  const DeviceKernels* const kernels =
      x.is_cpu() ? nullptr : find_device_kernels(x.device().type());
  return kernels && kernels->to_fp8 && x.scalar_type() != at::kDouble && x.numel() > 0 &&
         x.size(0) % kFp8Multiple == 0 && x.size(1) % kFp8Multiple == 0 &&
         reinterpret_cast<uintptr_t>(x.const_data_ptr()) % kWordBytes == 0;
}

}  // namespace

at::Tensor largest_absolute(const at::Tensor& x) { return largest_along(x, {}, 1); }

at::Tensor largest_absolute_of_rows(const at::Tensor& x) {
  return largest_along(x, {-1}, x.size(0));
}

at::Tensor largest_absolute_of_columns(const at::Tensor& x) {
  return largest_along(x, {0}, x.size(1));
}

at::Tensor fp8_scale(const at::Tensor& largest, at::ScalarType format, int64_t margin) {
  const double number = std::ldexp(largest_number(format), -static_cast<int>(margin));
  const at::Tensor scale = largest.reciprocal().mul_(number).clamp_max_(kLargestScale);
  return at::where(largest.gt(0).logical_and_(largest.lt(kInfinity)), scale, 1.0F);
}

Fp8Matrix to_fp8(const at::Tensor& x, at::ScalarType format, const at::Tensor& scale) {
  const double most = largest_number(format);
  // The conversion turns numbers that are too large into infinity or NaN. x - x is 0, or NaN for
  // infinity.
  return {at::mul(x, scale).clamp_(-most, most).add_(x - x).to(format), scale.reciprocal()};
}

void to_fp8_by_operators(const Fp8Tensors& t) {
  if (t.largest.defined()) {
    at::Tensor most = t.largest;
    at::maximum_out(most, most, largest_absolute(t.x));
  }
  const at::Tensor& any = t.values.defined() ? t.values : t.transposed;
  const at::Tensor scale = t.values.defined() ? t.scale : t.scale.t();
  const at::Tensor values = to_fp8(t.x, any.scalar_type(), scale).values;
  if (t.values.defined()) at::Tensor(t.values).copy_(values);
  if (t.transposed.defined()) at::Tensor(t.transposed).copy_(values.t());
}

Fp8Matrices to_fp8_matrices(const at::Tensor& given, at::ScalarType format, const at::Tensor& scale,
                            Fp8Sides sides, const at::Tensor& largest) {
  const at::Tensor x = given.contiguous();
  const auto options = x.options().dtype(format);
  const at::Tensor inverse = scale.reciprocal();
  require<UsageError>(scale.numel() == 1 || sides != Fp8Sides::both,
                      "to_fp8_matrices: found {} scales for both sides, allowed: 1", scale.numel());
  Fp8Matrices result;
  if (sides != Fp8Sides::transposed) result.matrix = {at::empty(x.sizes(), options), inverse};
  if (sides != Fp8Sides::matrix)
    result.transposed = {at::empty({x.size(1), x.size(0)}, options), inverse};
  const Fp8Tensors tensors = {x, scale.contiguous(), largest, result.matrix.values,
                              result.transposed.values};
  const c10::DeviceGuard guard(x.device());
  if (has_kernel(x))
    device_kernels("to_fp8", x.device().type()).to_fp8(tensors);
  else
    to_fp8_by_operators(tensors);
  return result;
}

at::Tensor scaled_mm(const Fp8Matrix& a, const Fp8Matrix& b, const std::optional<at::Tensor>& bias,
                     at::ScalarType dtype, bool fast_sums) {
  const DeviceKernels* const kernels =
      a.values.is_cpu() ? nullptr : find_device_kernels(a.values.device().type());
  if (!kernels || !kernels->scaled_mm) return reference_mm(a, b, bias).to(dtype);
  const c10::DeviceGuard guard(a.values.device());
  const bool whole = a.inverse_scales.numel() == 1 && b.inverse_scales.numel() == 1;
  const at::ScalarType rounded = whole ? dtype : at::kBFloat16;
  // at::_scaled_mm takes no bias with a result in fp32.
  const bool with_bias = bias && rounded != at::kFloat && bias->scalar_type() == rounded;
  const at::Tensor product =
      kernels->scaled_mm(a, b, with_bias ? bias : std::nullopt, rounded, fast_sums);
  return (bias && !with_bias ? product + *bias : product).to(dtype);
}

}  // namespace lockstep::kernels
