#include "lockstep/tests/support/device/lagging_device.h"

#include <thread>

#include <c10/core/Event.h>

#include "lockstep/core/error.h"
#include "lockstep/tests/device/lagging_tests.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep::testing {
namespace {

using namespace std::chrono_literals;

at::Tensor on_device(const at::Tensor& tensor, int device = 0) {
  return tensor.to(lagging_device(device));
}

TEST_F(LaggingDevice, AnOperatorReturnsBeforeItsResultIsThere) {
  const at::Tensor x = on_device(at::full({8}, 3.0f));
  Gate gate(current_stream(0));
  const at::Tensor y = x * 2;
  EXPECT_EQ(y.sizes(), x.sizes());
  EXPECT_TRUE(host_view(y).isnan().all().item<bool>());
  gate.release();
  EXPECT_TRUE(at::equal(y.cpu(), at::full({8}, 6.0f)));
}

TEST_F(LaggingDevice, AStreamKeepsTheOrderOfItsTasks) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    at::Tensor x = on_device(at::zeros({4}));
    for (int i = 1; i <= 30; ++i) x = x * 1.5 + i;
    at::Tensor expected = at::zeros({4});
    for (int i = 1; i <= 30; ++i) expected = expected * 1.5 + i;
    expect_same_bits(x, expected, "seed " + std::to_string(seed));
  }
}

/// A second stream reads a value that the first computes.
at::Tensor read_on_second_stream(bool with_event) {
  const c10::Stream first = current_stream(0), second = new_stream(0);
  const at::Tensor x = on_device(at::ones({16}));
  at::Tensor y;
  for (int i = 0; i < 10; ++i) y = x + i;
  if (with_event) {
    c10::Event event(c10::DeviceType::PrivateUse1);
    event.record(first);
    event.block(second);
  }
  at::Tensor read;
  {
    const c10::StreamGuard guard(second);
    read = y * 1;
    wait_for_stream(second, "the test");
  }
  return host_view(read).clone();
}

TEST_F(LaggingDevice, AMissingEventBetweenStreamsShows) {
  uint64_t wrong = 0;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart_lazy(seed);
    if (!at::equal(read_on_second_stream(/*with_event=*/false), at::full({16}, 10.0f))) ++wrong;
    wait_for_all_streams();
  }
  EXPECT_EQ(wrong, kSeeds);
}

TEST_F(LaggingDevice, AnEventOrdersStreams) {
  for (uint64_t seed = 1; seed <= 2 * kSeeds; ++seed) {
    seed <= kSeeds ? restart(seed) : restart_lazy(seed);
    expect_same_bits(read_on_second_stream(/*with_event=*/true), at::full({16}, 10.0f),
                     "seed " + std::to_string(seed));
  }
}

TEST_F(LaggingDevice, TasksAreDelayedWhileNobodyWaits) {
  restart_lazy(1);
  std::atomic<int> done{0};
  for (int i = 0; i < 50; ++i) enqueue(current_stream(0), "work", [&done] { ++done; });
  std::this_thread::sleep_for(50ms);
  EXPECT_LT(done, 25);
  wait_for_stream(current_stream(0), "the test");
  EXPECT_EQ(done, 50);
}

TEST_F(LaggingDevice, DelaysEndWhenTheHostWaits) {
  restart_lazy(1);
  const c10::Stream first = current_stream(0), second = new_stream(0), third = new_stream(0);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 100; ++i) enqueue(first, "work", [] {});
  const DeviceEvent event = DeviceEvent::record(first);
  for (int i = 0; i < 100; ++i) enqueue(first, "more work", [] {});
  event.block(second);
  DeviceEvent::record(second).block(third);
  wait_for_stream(third, "the test");
  EXPECT_LT(std::chrono::steady_clock::now() - begin, 20s);  // 50 s of delays
  EXPECT_TRUE(event.reached());
  EXPECT_FALSE(is_idle(first));
  wait_for_stream(first, "the test");
}

TEST_F(LaggingDevice, StreamsRunSideBySide) {
  Gate gate(current_stream(0));
  const c10::Stream second = new_stream(0);
  const c10::StreamGuard guard(second);
  const at::Tensor x = at::full({4}, 2.0f, at::TensorOptions(lagging_device(0)));
  EXPECT_TRUE(at::equal(x.cpu(), at::full({4}, 2.0f)));
  EXPECT_FALSE(is_idle(default_stream(0)));
}

TEST_F(LaggingDevice, AnEventIsReachedWhenItsStreamIs) {
  Gate gate(current_stream(0));
  c10::Event event(c10::DeviceType::PrivateUse1);
  event.record(current_stream(0));
  EXPECT_FALSE(event.query());
  EXPECT_FALSE(current_stream(0).query());
  gate.release();
  event.synchronize();
  EXPECT_TRUE(event.query());
  EXPECT_EQ(device_counts(0).waits_by.at("synchronize event"), 1);
}

TEST_F(LaggingDevice, CurrentDeviceAndStreamBelongToTheThread) {
  set_current_device(2);
  const c10::Stream own = new_stream(2);
  exchange_current_stream(own);
  std::thread([] {
    EXPECT_EQ(current_device(), 0);
    EXPECT_EQ(current_stream(2), default_stream(2));
  }).join();
  {
    const c10::DeviceGuard guard(lagging_device(1));
    EXPECT_EQ(current_device(), 1);
    EXPECT_EQ(at::empty({1}, at::TensorOptions(c10::DeviceType::PrivateUse1)).device().index(), 1);
  }
  EXPECT_EQ(current_device(), 2);
  EXPECT_EQ(current_stream(2), own);
  exchange_current_stream(default_stream(2));
  set_current_device(0);
}

TEST_F(LaggingDevice, AnOperatorRunsOnTheDeviceOfItsTensors) {
  Gate gate(default_stream(0));
  const at::Tensor x = on_device(at::ones({4}), 3);
  EXPECT_TRUE(at::equal((x + 1).cpu(), at::full({4}, 2.0f)));  // does not wait for device 0's gate
  EXPECT_EQ(device_counts(3).launches, 3);                     // copy, add, copy
}

TEST_F(LaggingDevice, TensorsOfSeveralDevicesAreAnError) {
  const at::Tensor a = on_device(at::ones({4}), 0), b = on_device(at::ones({4}), 1);
  EXPECT_TRUE(throws_with<c10::Error>([&] { a + b; }, "on the same device"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { a + at::ones({4}); }, "on the same device"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { a.view({2, 2}).mm(b.view({2, 2})); }, "same device"));
  EXPECT_TRUE(at::equal((a + at::scalar_tensor(2.0f)).cpu(), at::full({4}, 3.0f)));
}

TEST_F(LaggingDevice, APointerOfAnotherDeviceIsAnIllegalAccess) {
  const at::Tensor a = on_device(at::ones({4}), 1);
  check_pointer(a, 1);
  check_pointer(at::Tensor(), 0);
  EXPECT_TRUE(throws_with<c10::Error>([&] { check_pointer(a, 0); }, "illegal memory access"));
  EXPECT_TRUE(
      throws_with<c10::Error>([&] { check_pointer(at::ones({4}), 0); }, "illegal memory access"));
}

TEST_F(LaggingDevice, CopiesBetweenDevicesWaitForBothStreams) {
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    const at::Tensor a = on_device(at::arange(32, at::kFloat), 0);
    const at::Tensor b = (a * 3).to(lagging_device(1), /*non_blocking=*/true) + 1;
    a.zero_();
    expect_same_bits(b, at::arange(32, at::kFloat) * 3 + 1, "seed " + std::to_string(seed));
  }
  EXPECT_EQ(device_counts(0).waits, 1);  // the copy from pageable memory with the last seed
}

TEST_F(LaggingDevice, ACopyBetweenDevicesWaitsForItsTarget) {
  const at::Tensor a = on_device(at::ones({8}), 0), b = on_device(at::zeros({8}), 1);
  Gate gate(current_stream(1));
  b.fill_(9);
  b.copy_(a, /*non_blocking=*/true);
  std::this_thread::sleep_for(20ms);  // time for a copy that fails to wait
  gate.release();
  EXPECT_TRUE(at::equal(b.cpu(), at::ones({8})));
}

TEST_F(LaggingDevice, BackwardRunsOnTheStreamsOfForward) {
  const auto run = [](c10::Device device, const std::function<void()>& switch_stream) {
    const at::Tensor x = at::arange(24, at::kFloat).view({4, 6}).to(device).requires_grad_();
    const at::Tensor first = at::gelu(x * 0.1);
    switch_stream();
    const at::Tensor second = first.mm(first.t());
    second.sum().backward();
    return x.grad();
  };
  const at::Tensor expected = run(at::kCPU, [] {});
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    restart(seed);
    const c10::Stream first = current_stream(1), second = new_stream(1);
    const at::Tensor gradient = run(lagging_device(1), [&] {
      DeviceEvent::record(first).block(second);
      exchange_current_stream(second);
    });
    exchange_current_stream(first);  // gradients are ready on the streams of their leaves
    DeviceEvent::record(second).block(first);
    expect_same_bits(gradient, expected, "seed " + std::to_string(seed));
  }
}

TEST_F(LaggingDevice, AProcessMayEndWhileStreamsAreBusy) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end_early = [] {
    restart(1, 20ms);
    const at::Tensor x = on_device(at::ones({64, 64}));
    for (int i = 0; i < 200; ++i) x.mm(x);
    DeviceEvent::record(new_stream(1)).block(new_stream(2));
    std::exit(0);
  };
  EXPECT_EXIT(end_early(), ::testing::ExitedWithCode(0), "");
}

TEST_F(LaggingDevice, WaitsAreCountedByCause) {
  const at::Tensor x = on_device(at::arange(6, at::kFloat));
  EXPECT_EQ(x.sum().item<float>(), 15);
  EXPECT_EQ(x.nonzero().size(0), 5);
  EXPECT_EQ(x.masked_select(x > 2).numel(), 3);
  EXPECT_TRUE(at::equal(x.index({x > 2}).cpu(), at::tensor({3.0f, 4.0f, 5.0f})));
  EXPECT_TRUE(at::equal(x, x));
  current_stream(0).synchronize();
  const DeviceCounts counts = device_counts(0);
  const std::map<std::string, int64_t> expected = {{"aten::_local_scalar_dense", 1},
                                                   {"aten::equal", 1},
                                                   {"aten::index", 1},
                                                   {"aten::masked_select", 1},
                                                   {"aten::nonzero", 1},
                                                   {"copy from pageable memory", 1},
                                                   {"copy to host", 1},
                                                   {"synchronize stream", 1}};
  EXPECT_EQ(counts.waits_by, expected);
  EXPECT_EQ(counts.waits, 8);
  EXPECT_EQ(device_counts(1).waits, 0);
  reset_device_counts();
  EXPECT_EQ(device_counts(0).waits, 0);
}

TEST_F(LaggingDevice, TheFirstErrorOfAKernelStaysAndLaterKernelsDoNotRun) {
  const at::Tensor table = on_device(at::ones({4, 2}));
  const at::Tensor wrong = at::embedding(table, on_device(at::tensor({1, 9})));
  bool ran = false;
  enqueue(current_stream(0), "the next", [&ran] { ran = true; });
  EXPECT_TRUE(throws_with<c10::Error>([&] { wrong.cpu(); }, "aten::index_select([4, 2] Float"));
  EXPECT_FALSE(ran);
  EXPECT_TRUE(throws_with<c10::Error>([&] { current_stream(0).synchronize(); }, "earlier kernel"));
  enqueue(current_stream(0), "another", [] { throw std::runtime_error("second"); });
  EXPECT_TRUE(throws_with<c10::Error>([&] { table.cpu(); }, "out of"));
  EXPECT_TRUE(device_error(0).has_value());
  EXPECT_FALSE(device_error(1).has_value());
  on_device(at::ones({1}), 1).cpu();
  clear_device_errors();
  EXPECT_TRUE(at::equal(table.cpu(), at::ones({4, 2})));
}

TEST_F(LaggingDevice, WhatCudaLacksIsRefused) {
  const auto options = at::TensorOptions(lagging_device(0));
  at::Tensor found = at::zeros({1}, options);
  const at::Tensor scale = at::ones({1}, options);
  const auto unscale = [&](at::ScalarType dtype) {
    at::_amp_foreach_non_finite_check_and_unscale_({at::ones({2}, options.dtype(dtype))}, found,
                                                   scale);
  };
  unscale(at::kFloat);
  unscale(at::kHalf);
  EXPECT_TRUE(throws_with<c10::NotImplementedError>(
      [&] { unscale(at::kBFloat16); },
      "\"_amp_foreach_non_finite_check_and_unscale_cuda\" not implemented for 'BFloat16'"));
  const std::vector<at::Tensor> mixed = {at::ones({2}, options),
                                         at::ones({2}, options.dtype(at::kHalf))};
  const auto unscale_all = at::_amp_foreach_non_finite_check_and_unscale_;
  EXPECT_TRUE(throws_with<c10::Error>([&] { unscale_all({mixed[0]}, found, at::ones({})); },
                                      "inv_scale must be a CUDA tensor"));
  EXPECT_TRUE(throws_with<c10::Error>([&] { unscale_all(mixed, found, scale); }, "one dtype"));
  const at::Tensor integers = at::ones({2, 2}, options.dtype(at::kLong));
  EXPECT_TRUE(throws_with<c10::NotImplementedError>([&] { integers.mm(integers); }, "addmm_cuda"));
}

TEST_F(LaggingDevice, OptionsAreChecked) {
  EXPECT_TRUE(throws_with<UsageError>([] { use_lagging_device({.devices = 5}); },
                                      "devices: found 5, allowed: 1 to 4, as in the first call"));
  EXPECT_TRUE(throws_with<UsageError>([] { use_lagging_device({.devices = 4, .delayed = 2}); },
                                      "delayed: found 2"));
  EXPECT_TRUE(throws_with<UsageError>([] { lagging_device(4); }, "found index 4"));
}

}  // namespace
}  // namespace lockstep::testing
