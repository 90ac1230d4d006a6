#include "lockstep/kernels/fingerprint.h"

#include <atomic>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"
#include "lockstep/core/parallel_for.h"
#include "lockstep/kernels/device_kernels.h"
#include "lockstep/kernels/fingerprint_loop.h"

namespace lockstep::kernels {
namespace {

constexpr int64_t kWord = 4;
constexpr int64_t kBlock = 1 << 16;  ///< bytes that a thread takes at once
constexpr int64_t kPiece = 1 << 24;  ///< bytes that operators take at once; bounds their results

at::Tensor bytes_of(const at::Tensor& tensor) {
  require<UsageError>(tensor.is_contiguous(), "fingerprint: found a tensor that is not contiguous");
  return tensor.detach().view({-1}).view(at::kByte);
}

}  // namespace

at::Tensor fingerprint(const at::Tensor& tensor) {
  if (!tensor.is_cpu()) {
    const DeviceKernels* const device = find_device_kernels(tensor.device().type());
    if (!device || !device->fingerprint) return fingerprint_by_operators(tensor);
    const c10::DeviceGuard guard(tensor.device());
    return device->fingerprint(bytes_of(tensor));
  }
  const at::Tensor bytes = bytes_of(tensor);
  const auto* const memory = bytes.const_data_ptr<uint8_t>();
  const int64_t size = bytes.numel();
  std::atomic<uint64_t> sum = 0;  // an integer sum, so the order does not matter
  parallel_for(0, ceil_div(size, kBlock), 16, [&](int64_t begin, int64_t end) {
    const int64_t first = begin * kBlock, last = std::min(size, end * kBlock);
    sum += fingerprint_loop(memory + first, last - first, first / kWord);
  });
  return at::full({}, static_cast<int64_t>(sum.load()), at::kLong);
}

at::Tensor fingerprint_by_operators(const at::Tensor& tensor) {
  constexpr int64_t kLowHalf = 0xffffffff;
  const at::Tensor bytes = bytes_of(tensor);
  at::Tensor sum = at::zeros({}, bytes.options().dtype(at::kLong));
  for (int64_t first = 0; first < bytes.numel(); first += kPiece) {
    const int64_t size = std::min(kPiece, bytes.numel() - first);
    const int64_t count = ceil_div(size, kWord);
    const at::Tensor words = at::zeros({count}, bytes.options().dtype(at::kInt));
    words.view(at::kByte).narrow(0, 0, size).copy_(bytes.narrow(0, first, size));
    const at::Tensor numbers =
        at::arange(first / kWord, first / kWord + count, sum.options()).mul_(2).add_(1);
    sum += words.to(at::kLong).bitwise_and_(kLowHalf).mul_(numbers.bitwise_and_(kLowHalf)).sum();
  }
  return sum;
}

}  // namespace lockstep::kernels
