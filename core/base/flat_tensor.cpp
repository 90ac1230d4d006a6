#include "lockstep/core/flat_tensor.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>

namespace lockstep {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kShare = 16;  ///< at most 1 / kShare of the bytes is allocated on top of them

size_t rounded_up(size_t bytes) { return (bytes + kHugePage - 1) / kHugePage * kHugePage; }

/// Maps new pages: malloc may give memory that was used before, in ordinary pages.
class Mapping {
 public:
  explicit Mapping(size_t bytes) : bytes_(rounded_up(bytes) + kHugePage) {
    begin_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK(begin_ != MAP_FAILED, "can't allocate memory: found a request for ", bytes,
                " bytes: ", std::strerror(errno));
    const size_t whole = bytes / kHugePage * kHugePage;
    ::madvise(data(), rounded_up(bytes) - bytes <= bytes / kShare ? rounded_up(bytes) : whole,
              MADV_HUGEPAGE);
    c10::profiledCPUMemoryReporter().New(data(), bytes);
  }
  ~Mapping() {
    c10::profiledCPUMemoryReporter().Delete(data());
    ::munmap(begin_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  /// At the start of a huge page; there is memory up to the end of the last one.
  void* data() const {
    const auto begin = reinterpret_cast<uintptr_t>(begin_);
    return static_cast<char*>(begin_) + (rounded_up(begin) - begin);
  }

 private:
  size_t bytes_;
  void* begin_;
};

class HugePageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* const mapping = new Mapping(bytes);
    const auto unmap = [](void* context) { delete static_cast<Mapping*>(context); };
    return {mapping->data(), mapping, unmap, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

bool takes_huge_pages(size_t bytes, const at::TensorOptions& options) {
  return bytes >= kHugePage && options.device().is_cpu() && !options.pinned_memory() &&
         c10::GetCPUAllocator() == c10::GetDefaultCPUAllocator();
}

}  // namespace

at::Tensor flat_zeros(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const size_t bytes =
      static_cast<size_t>(c10::multiply_integers(sizes)) * options.dtype().itemsize();
  if (!takes_huge_pages(bytes, options)) return at::zeros(sizes, options);
  static HugePageAllocator allocator;  // its memory is new, so it holds zeros
  return at::Tensor(at::detail::empty_generic(sizes, &allocator,
                                              c10::DispatchKeySet(c10::DispatchKey::CPU),
                                              c10::typeMetaToScalarType(options.dtype()), {}));
}

}  // namespace lockstep
