#include "lockstep/kernels/sum_of_squares.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/sum_of_squares_loop.h"

namespace lockstep::kernels {
namespace {

/// Sums blocks of fixed size in parallel, then the sums of the blocks in order.
template <class T>
double sum_of_squares_cpu(const T* x, int64_t n) {
  constexpr int64_t kBlock = 1 << 14;
  std::vector<double> sums(static_cast<size_t>(ceil_div(n, kBlock)));
  parallel_for(0, static_cast<int64_t>(sums.size()), 4, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block)
      sums[static_cast<size_t>(block)] =
          sum_of_squares_loop(x + block * kBlock, std::min(kBlock, n - block * kBlock));
  });
  double total = 0;
  for (const double sum : sums) total += sum;
  return total;
}

}  // namespace

at::Tensor sum_of_squares(const at::Tensor& flat) {
  const at::ScalarType dtype = flat.scalar_type();
  require<UsageError>(flat.is_contiguous() &&
                          (dtype == at::kFloat || dtype == at::kDouble || dtype == at::kBFloat16),
                      "sum_of_squares: found {}{}, allowed: contiguous Float, Double, BFloat16",
                      at::toString(dtype), flat.is_contiguous() ? "" : " that is not contiguous");
  if (!flat.is_cpu()) {
    const c10::DeviceGuard guard(flat.device());
    return device_kernels("sum_of_squares", flat.device().type()).sum_of_squares(flat);
  }
  const int64_t n = flat.numel();
  const double sum =
      dtype == at::kFloat ? sum_of_squares_cpu(flat.const_data_ptr<float>(), n)
      : dtype == at::kDouble
          ? sum_of_squares_cpu(flat.const_data_ptr<double>(), n)
          : sum_of_squares_cpu(
                reinterpret_cast<const uint16_t*>(flat.const_data_ptr<at::BFloat16>()), n);
  return at::full({}, sum, at::kDouble);
}

}  // namespace lockstep::kernels
