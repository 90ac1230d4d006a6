#include "lockstep/core/flat_tensor.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

namespace lockstep {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kShare = 16;  ///< at most this part of the bytes is allocated beside them

size_t rounded_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

/// Memory that begins, and if that costs little also ends, with a huge page.
class HugePageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t whole = rounded_up(bytes), size = whole - bytes <= bytes / kShare ? whole : bytes;
    void* data = nullptr;
    const int error = ::posix_memalign(&data, kHugePage, size);
    TORCH_CHECK(error == 0, "cannot allocate ", size, " bytes: ", std::strerror(error));
    ::madvise(data, size / kHugePage * kHugePage, MADV_HUGEPAGE);
    c10::profiledCPUMemoryReporter().New(data, size);
    return {data, data, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void release(void* data) {
    c10::profiledCPUMemoryReporter().Delete(data);
    std::free(data);
  }
};

bool takes_huge_pages(size_t bytes, const at::TensorOptions& options) {
  return bytes >= kHugePage && options.device().is_cpu() && !options.pinned_memory() &&
         c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
}

}  // namespace

at::Tensor flat_zeros(int64_t numel, const at::TensorOptions& options) {
  const size_t bytes = static_cast<size_t>(numel) * options.dtype().itemsize();
  if (!takes_huge_pages(bytes, options)) return at::zeros({numel}, options);
  static HugePageAllocator allocator;
  return at::Tensor(at::detail::empty_generic({numel}, &allocator,
                                              c10::DispatchKeySet(c10::DispatchKey::CPU),
                                              c10::typeMetaToScalarType(options.dtype()), {}))
      .zero_();
}

}  // namespace lockstep
