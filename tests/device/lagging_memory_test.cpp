#include <optional>

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Event.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/closed_storage.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

at::TensorOptions floats_on(int device) { return {lagging_device(device)}; }

bool is_poison(const at::Tensor& on_host) { return on_host.isnan().all().item<bool>(); }

TEST_F(LaggingDevice, FreshMemoryIsPoison) {
  EXPECT_TRUE(is_poison(at::empty({100}, floats_on(0)).cpu()));
  const at::Tensor integers = at::empty({3}, floats_on(0).dtype(at::kLong)).cpu();
  EXPECT_TRUE(at::equal(integers, at::full({3}, -1)));
  EXPECT_EQ(at::empty({0, 3}, floats_on(0)).cpu().numel(), 0);
}

TEST_F(LaggingDevice, FreedMemoryGoesToTheSameStreamAtOnceAndIsPoison) {
  at::Tensor a = at::ones({1000}, floats_on(0));
  const void* const memory = a.data_ptr();
  a.reset();
  const c10::Stream other = new_stream(0);
  {
    const c10::StreamGuard guard(other);
    EXPECT_NE(at::empty({1000}, floats_on(0)).data_ptr(), memory);
  }
  const at::Tensor b = at::empty({1000}, floats_on(0));
  EXPECT_EQ(b.data_ptr(), memory);
  EXPECT_TRUE(is_poison(b.cpu()));
}

/// A second stream reads a tensor. Its owner frees it during the read, and the owner's stream
/// reuses the memory.
at::Tensor read_while_freed(bool record) {
  const c10::Stream second = new_stream(0);
  std::optional<Gate> gate;
  at::Tensor result = at::empty({64}, floats_on(0));
  {
    at::Tensor source = at::ones({64}, floats_on(0));
    c10::Event ready(c10::DeviceType::PrivateUse1);
    ready.record(current_stream(0));
    ready.block(second);
    gate.emplace(second);
    {
      const c10::StreamGuard guard(second);
      result.copy_(source);
    }
    if (record) source.record_stream(second);
  }
  const at::Tensor next = at::zeros({64}, floats_on(0));
  wait_for_stream(current_stream(0), "the test");
  gate->release();
  wait_for_stream(second, "the test");
  return host_view(result).clone();
}

TEST_F(LaggingDevice, MemoryThatAnotherStreamStillReadsIsPoisonedWithoutRecordStream) {
  EXPECT_FALSE(at::equal(read_while_freed(/*record=*/false), at::ones({64})));
}

TEST_F(LaggingDevice, RecordStreamKeepsMemoryForTheOtherStream) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    EXPECT_TRUE(at::equal(read_while_freed(/*record=*/true), at::ones({64}))) << seed;
  }
}

TEST_F(LaggingDevice, RecordedMemoryIsUsedAgainWhenTheOtherStreamIsDone) {
  const c10::Stream second = new_stream(0);
  at::Tensor a = at::ones({5000}, floats_on(0));
  const void* const memory = a.data_ptr();
  a.record_stream(second);
  a.reset();
  wait_for_all_streams();
  EXPECT_EQ(at::empty({5000}, floats_on(0)).data_ptr(), memory);
}

TEST_F(LaggingDevice, PinnedMemoryIsKnownAndPoisonedWhenFresh) {
  const at::Tensor pinned = at::empty({10}, at::TensorOptions().pinned_memory(true));
  EXPECT_TRUE(pinned.is_pinned());
  EXPECT_TRUE(is_poison(pinned));
  EXPECT_FALSE(at::empty({10}).is_pinned());
  const at::Tensor copy = at::arange(10).pin_memory();
  EXPECT_TRUE(copy.is_pinned());
  EXPECT_TRUE(copy.slice(0, 3).is_pinned());
  EXPECT_TRUE(at::equal(copy, at::arange(10)));
}

TEST_F(LaggingDevice, ACopyIntoPinnedMemoryDoesNotWait) {
  const at::Tensor x = at::ones({10}, floats_on(0));
  Gate gate(current_stream(0));
  const at::Tensor pinned = at::empty({10}, at::TensorOptions().pinned_memory(true));
  pinned.copy_(x, /*non_blocking=*/true);
  EXPECT_TRUE(is_poison(pinned));
  gate.release();
  EXPECT_EQ(device_counts(0).waits, 0);
  current_stream(0).synchronize();
  EXPECT_TRUE(at::equal(pinned, at::ones({10})));
}

TEST_F(LaggingDevice, ACopyToTheHostThatDoesNotBlockHasToBeWaitedFor) {
  const at::Tensor x = at::ones({10}, floats_on(0));
  Gate gate(current_stream(0));
  const at::Tensor on_host = x.to(at::kCPU, /*non_blocking=*/true);
  EXPECT_TRUE(on_host.is_pinned());
  EXPECT_TRUE(is_poison(on_host));
  gate.release();
  current_stream(0).synchronize();
  EXPECT_TRUE(at::equal(on_host, at::ones({10})));
}

TEST_F(LaggingDevice, PinnedMemoryThatIsOverwrittenDuringItsCopyShows) {
  at::Tensor pinned = at::ones({10}).pin_memory();
  Gate gate(current_stream(0));
  const at::Tensor x = pinned.to(lagging_device(0), /*non_blocking=*/true);
  pinned.fill_(7);
  gate.release();
  EXPECT_EQ(device_counts(0).waits, 0);
  EXPECT_TRUE(at::equal(x.cpu(), at::full({10}, 7.0f)));
}

TEST_F(LaggingDevice, FreedPinnedMemoryIsNotUsedAgainDuringItsCopy) {
  at::Tensor pinned = at::ones({777}).pin_memory();
  const void* const memory = pinned.data_ptr();
  Gate gate(current_stream(0));
  const at::Tensor x = pinned.to(lagging_device(0), /*non_blocking=*/true);
  pinned.reset();
  EXPECT_NE(at::empty({777}, at::TensorOptions().pinned_memory(true)).data_ptr(), memory);
  gate.release();
  EXPECT_TRUE(at::equal(x.cpu(), at::ones({777})));
}

TEST_F(LaggingDevice, CopiesThatCudaWaitsForAreCounted) {
  const at::Tensor pageable = at::ones({10}), pinned = at::ones({10}).pin_memory();
  const at::Tensor x = at::empty({10}, floats_on(0));
  x.copy_(pageable, /*non_blocking=*/true);
  x.copy_(pinned);
  x.copy_(pinned, /*non_blocking=*/true);
  pageable.copy_(x, /*non_blocking=*/true);
  pinned.copy_(x);
  x.copy_(pinned.to(at::kDouble).pin_memory(),
          /*non_blocking=*/true);  // converted: not one transfer
  const std::map<std::string, int64_t> expected = {
      {"copy from pageable memory", 1}, {"copy from pinned memory", 2}, {"copy to host", 2}};
  EXPECT_EQ(device_counts(0).waits_by, expected);
}

TEST_F(LaggingDevice, AnAsynchronousCopyDoesNotKeepItsTensors) {
  at::Tensor x = at::ones({321}, floats_on(0));
  const at::Tensor pinned = at::empty({321}, at::TensorOptions().pinned_memory(true));
  const c10::Stream second = new_stream(0);
  current_stream(0).synchronize();
  Gate gate(second);
  {
    const c10::StreamGuard guard(second);
    pinned.copy_(x, /*non_blocking=*/true);
  }
  x.reset();
  current_stream(0).synchronize();
  gate.release();
  second.synchronize();
  EXPECT_TRUE(is_poison(pinned));
}

TEST_F(LaggingDevice, BytesOfLiveTensorsAreKnown) {
  wait_for_all_streams();
  const DeviceBytes before = device_bytes(0);
  reset_peak_bytes(0);
  {
    const at::Tensor a = at::empty({1024}, floats_on(0)), b = at::empty({1024}, floats_on(0));
    EXPECT_EQ(device_bytes(0).live - before.live, 8192);
  }
  EXPECT_EQ(device_bytes(0).live, before.live);
  const auto stats = c10::getDeviceAllocator(c10::DeviceType::PrivateUse1)->getDeviceStats(0);
  EXPECT_EQ(stats.allocated_bytes[0].peak - before.live, 8192);
  EXPECT_EQ(stats.allocated_bytes[0].current, before.live);
}

TEST_F(LaggingDevice, StoragesGrowInTheOrderOfTheStream) {
  const at::Tensor x = at::ones({4}, floats_on(0));
  x.mul_(3).resize_({8});
  const at::Tensor found = x.cpu();
  EXPECT_TRUE(at::equal(found.slice(0, 0, 4), at::full({4}, 3.0f)));
  EXPECT_TRUE(is_poison(found.slice(0, 4)));
  at::Tensor whole = at::empty({0}, floats_on(0));
  whole.set_(x.storage(), 2, {2, 3}, {3, 1});
  EXPECT_EQ(whole.data_ptr<float>(), x.data_ptr<float>() + 2);
}

TEST_F(LaggingDevice, AClosedStorageRaisesItsErrorAtLaunch) {
  const at::Tensor x = at::ones({4}, floats_on(0));
  const c10::Storage open = x.storage();
  set_storage_of(x, closed_twin(open, "the gather of this bucket is under way"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { x + 1; }, "the gather of this bucket is under way"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { x.mul_(2); }, "the gather of this bucket"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { x.sum().item(); }, "the gather of this bucket"));
  EXPECT_EQ(x.view({2, 2}).size(0), 2);
  set_storage_of(x, open);
  EXPECT_TRUE(at::equal((x + 1).cpu(), at::full({4}, 2.0f)));
  EXPECT_FALSE(device_error(0).has_value());
}

TEST_F(LaggingDevice, GradientsComeBackToTheirDeviceWhicheverIsCurrent) {
  const at::Tensor weight = at::ones({8}, floats_on(1)).requires_grad_(true);
  ParamAndGradBuffer buffer({{"weight", weight, default_description(weight)}}, at::kFloat, {});
  buffer.grad_view(0).fill_(3);
  ASSERT_EQ(current_device(), 0);
  const int64_t elsewhere = device_bytes(0).live;
  buffer.offload_grads();
  buffer.restore_grads();
  EXPECT_EQ(device_bytes(0).live, elsewhere);
  EXPECT_EQ(buffer.grad_data().data_ptr(), weight.grad().data_ptr());
  EXPECT_EQ(device_of_pointer(weight.grad().data_ptr()), 1);
  EXPECT_TRUE(at::equal(weight.grad().cpu(), at::full({8}, 3.0f)));
}

}  // namespace
}  // namespace lockstep::testing
