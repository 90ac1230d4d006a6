#include "lockstep/kernels/swiglu.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/layer_kernels.h"
#include "lockstep/kernels/storage_of.h"
#include "lockstep/kernels/swiglu_loop.h"

namespace lockstep::kernels {
namespace {

int64_t rows_of_thread(int64_t width) { return std::max<int64_t>(1, (1 << 14) / width); }

int64_t width_of(const at::Tensor& inner) {
  const int64_t found = inner.dim() > 0 ? inner.size(-1) : 0;
  require<UsageError>(found > 0 && found % 2 == 0,
                      "swiglu: found rows of {}, allowed: two halves of the same width", found);
  return found / 2;
}

}  // namespace

void swiglu_cpu(const at::Tensor& inner, const at::Tensor& result) {
  const int64_t width = result.size(-1);
  for_storage("swiglu", inner.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T* const from = elements<T>(inner);
    T* const to = elements<T>(result);
    parallel_for(0, result.numel() / width, rows_of_thread(width), [&](int64_t first, int64_t end) {
      swiglu_loop(from + 2 * first * width, to + first * width, end - first, width);
    });
  });
}

void swiglu_gradient_cpu(const at::Tensor& grad, const at::Tensor& inner,
                         const at::Tensor& of_inner) {
  const int64_t width = grad.size(-1);
  for_storage("swiglu", inner.scalar_type(), [&](auto element) {
    using T = decltype(element);
    const T *const from = elements<T>(inner), *const of_result = elements<T>(grad);
    T* const to = elements<T>(of_inner);
    parallel_for(0, grad.numel() / width, rows_of_thread(width), [&](int64_t first, int64_t end) {
      swiglu_gradient_loop(of_result + first * width, from + 2 * first * width,
                           to + 2 * first * width, end - first, width);
    });
  });
}

at::Tensor swiglu(const at::Tensor& given) {
  const at::Tensor inner = given.contiguous();
  std::vector<int64_t> shape = inner.sizes().vec();
  shape.back() = width_of(inner);
  at::Tensor result = at::empty(shape, inner.options());
  if (result.numel() == 0) return result;
  const c10::DeviceGuard guard(inner.device());
  layer_kernels("swiglu", inner).swiglu(inner, result);
  return result;
}

at::Tensor swiglu_backward(const at::Tensor& grad, const at::Tensor& given) {
  const at::Tensor inner = given.contiguous();
  at::Tensor of_inner = at::empty_like(inner);
  if (inner.numel() == 0) return of_inner;
  const c10::DeviceGuard guard(inner.device());
  layer_kernels("swiglu", inner).swiglu_gradient(grad.contiguous(), inner, of_inner);
  return of_inner;
}

}  // namespace lockstep::kernels
