// Memory that exists only while it is used, and the pool that it comes from.

#include "lockstep/distributed/lent_storage.h"

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Others = LentStorage::OtherViews;

TEST(LentStorage, ListedViewsThrowWhileItIsClosedAndOthersFollow) {
  const auto pool = std::make_shared<BlockPool>(c10::kCPU);
  const at::Tensor flat = at::arange(6, at::kDouble);
  const at::Tensor listed = flat.narrow(0, 2, 4).view({2, 2});
  LentStorage storage(flat, {listed}, "it is not there", pool);
  const at::Tensor other = listed.t();
  EXPECT_TRUE(storage.is_open());
  storage.close(Others::follow);
  EXPECT_FALSE(storage.is_open());
  EXPECT_TRUE(throws_with<c10::Error>([&] { (void)listed.const_data_ptr(); }, "it is not there"));
  storage.set_message("it is gone");
  EXPECT_TRUE(throws_with<c10::Error>([&] { (void)listed.const_data_ptr(); }, "it is gone"));
  EXPECT_EQ(other.storage().data(), nullptr);
  EXPECT_EQ(flat.storage().data(), nullptr);

  storage.allocate();
  EXPECT_THROW((void)listed.const_data_ptr(), c10::Error);
  flat.copy_(at::arange(6, at::kDouble) * 10);
  storage.open();
  EXPECT_TRUE(at::equal(listed, at::arange(20, 60, 10, at::kDouble).view({2, 2})));
  EXPECT_TRUE(at::equal(other, listed.t()));
  EXPECT_EQ(other.const_data_ptr(), listed.const_data_ptr());
}

TEST(LentStorage, ViewsThatKeepTheirMemoryArePartedFromTheNext) {
  const auto pool = std::make_shared<BlockPool>(c10::kCPU);
  const at::Tensor flat = at::arange(4, at::kDouble);
  LentStorage storage(flat, {flat.view({2, 2})}, "closed", pool);
  storage.close(Others::follow);
  storage.open();
  flat.fill_(7);
  const at::Tensor kept = flat.view(-1);
  EXPECT_EQ(pool->bytes(), 32U);
  storage.close(Others::keep);
  EXPECT_EQ(pool->bytes(), 0U);  // the view owns it
  storage.open();
  flat.fill_(8);
  EXPECT_TRUE(at::equal(kept, at::full({4}, 7.0, at::kDouble)));
  storage.close(Others::keep);  // there are no other views
  EXPECT_EQ(pool->bytes(), 32U);
}

TEST(LentStorage, AViewThatGotOtherMemoryIsLeftAlone) {
  const auto pool = std::make_shared<BlockPool>(c10::kCPU);
  const at::Tensor flat = at::arange(4, at::kDouble);
  at::Tensor listed = flat.view({2, 2});
  LentStorage storage(flat, {listed}, "closed", pool);
  listed.set_data(at::ones({2, 2}, at::kDouble));
  storage.close(Others::follow);
  EXPECT_EQ(listed.sum().item<double>(), 4);
}

TEST(BlockPool, ABlockThatFitsIsTakenAgainAndOthersMakeRoom) {
  BlockPool pool(c10::kCPU);
  c10::DataPtr first = pool.take(1000);
  void* const place = first.get();
  pool.give(std::move(first));
  EXPECT_EQ(pool.bytes(), 1000U);
  c10::DataPtr again = pool.take(900);  // a quarter more is acceptable
  EXPECT_EQ(again.get(), place);
  pool.give(std::move(again));
  c10::DataPtr small = pool.take(500);
  EXPECT_EQ(pool.bytes(), 500U);
  c10::DataPtr large = pool.take(2000);
  EXPECT_EQ(pool.bytes(), 2500U);
  EXPECT_EQ(pool.peak_bytes(), 2500U);
  pool.give(std::move(large));
  pool.trim();
  EXPECT_EQ(pool.bytes(), 500U);
  pool.lose(small.get());
  EXPECT_EQ(pool.bytes(), 0U);
}

}  // namespace
}  // namespace lockstep
