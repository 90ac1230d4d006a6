#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <thread>

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/lagging_device.h"

namespace lockstep::testing {

constexpr int kLaggingDevices = 4;
constexpr uint64_t kSeeds = 20;

/// Keeps a stream busy until it is released, but for ten seconds at most.
class Gate {
 public:
  explicit Gate(const c10::Stream& stream) {
    const auto last = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    enqueue(stream, "a gate", [open = open_, last] {
      while (!*open && std::chrono::steady_clock::now() < last)
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
  }
  ~Gate() { release(); }
  Gate(const Gate&) = delete;
  Gate& operator=(const Gate&) = delete;

  void release() { *open_ = true; }

 private:
  std::shared_ptr<std::atomic<bool>> open_ = std::make_shared<std::atomic<bool>>(false);
};

/// Four devices without errors and with all counts at 0.
class LaggingDevice : public ::testing::Test {
 protected:
  void SetUp() override { restart(1); }
  void TearDown() override { clear_device_errors(); }

  /// Delays half of the tasks by up to `longest`.
  static void restart(uint64_t seed,
                      std::chrono::microseconds longest = std::chrono::microseconds(200)) {
    use_lagging_device(
        {.devices = kLaggingDevices, .seed = seed, .longest_delay = longest, .delayed = 0.5});
    clear_device_errors();
    reset_device_counts();
  }

  /// Streams do almost nothing until somebody waits for them.
  static void restart_lazy(uint64_t seed) {
    restart(seed);
    use_lagging_device({.devices = kLaggingDevices,
                        .seed = seed,
                        .longest_delay = std::chrono::seconds(1),
                        .delayed = 1});
  }
};

/// Expects the same dtype, shape, strides and bits. Waits for `on_device`.
inline void expect_same_bits(const at::Tensor& on_device, const at::Tensor& on_cpu,
                             const std::string& what) {
  ASSERT_EQ(on_device.defined(), on_cpu.defined()) << what;
  if (!on_cpu.defined()) return;
  EXPECT_EQ(on_device.strides(), on_cpu.strides()) << what;
  const at::Tensor found = on_device.cpu();
  ASSERT_EQ(found.scalar_type(), on_cpu.scalar_type()) << what;
  ASSERT_EQ(found.sizes(), on_cpu.sizes()) << what;
  EXPECT_TRUE(at::equal(found.contiguous().view(-1).view(at::kByte),
                        on_cpu.contiguous().view(-1).view(at::kByte)))
      << what << ": found " << found << ", on the CPU " << on_cpu;
}

}  // namespace lockstep::testing
