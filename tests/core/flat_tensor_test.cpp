#include "lockstep/core/flat_tensor.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

namespace lockstep {
namespace {

constexpr int64_t kMebibyte = 1 << 20;

bool begins_with_a_huge_page(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % (2 * kMebibyte) == 0;
}

TEST(FlatTensor, HoldsZerosAndBeginsWithAHugePageFromTwoMebibytesOn) {
  for (const at::ScalarType dtype : {at::kBFloat16, at::kFloat, at::kDouble})
    for (const int64_t bytes : {int64_t{0}, int64_t{80}, 2 * kMebibyte - 8, 2 * kMebibyte,
                                4 * kMebibyte - 160, 5 * kMebibyte + 8}) {
      const auto item = static_cast<int64_t>(at::elementSize(dtype));
      for (int again = 0; again < 2; ++again) {  // with memory that was used before
        const at::Tensor flat = flat_zeros(bytes / item, at::TensorOptions(dtype));
        EXPECT_EQ(flat.scalar_type(), dtype);
        EXPECT_EQ(flat.sizes(), at::IntArrayRef({bytes / item}));
        EXPECT_EQ(flat.storage().nbytes(), static_cast<size_t>(bytes));
        EXPECT_EQ(at::count_nonzero(flat).item<int64_t>(), 0);
        EXPECT_TRUE(bytes < 2 * kMebibyte || begins_with_a_huge_page(flat.data_ptr())) << bytes;
        flat.fill_(1);
      }
    }
}

TEST(FlatTensor, MemoryThatItsStorageGetsAgainIsOfTheSameKind) {
  const at::Tensor flat = flat_zeros(kMebibyte, at::TensorOptions(at::kFloat));
  const c10::DataPtr again = flat.storage().allocator()->allocate(4 * kMebibyte);
  EXPECT_TRUE(begins_with_a_huge_page(again.get()));
  EXPECT_TRUE(at::equal(flat.clone(), flat));
}

}  // namespace
}  // namespace lockstep
