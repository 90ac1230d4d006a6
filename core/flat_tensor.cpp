#include "lockstep/core/flat_tensor.h"

#include <sys/mman.h>

#include <cstdint>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

/// Of the memory only whole huge pages, so that nothing beside it is touched.
void advise_huge_pages(void* data, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (address + bytes) / kHugePage * kHugePage;
  if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace

at::Tensor flat_zeros(int64_t numel, const at::TensorOptions& options) {
  at::Tensor flat = at::empty({numel}, options);
  if (flat.is_cpu()) advise_huge_pages(flat.data_ptr(), flat.nbytes());
  return flat.zero_();
}

}  // namespace lockstep
