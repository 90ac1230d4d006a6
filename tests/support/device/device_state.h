#pragma once

// Internal: state that the parts of the device share.

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include <c10/core/Device.h>

#include "lockstep/tests/support/device/lagging_device.h"

namespace lockstep::testing {

constexpr c10::DeviceType kLagging = c10::DeviceType::PrivateUse1;
constexpr int kMaxDevices = 32;

inline c10::Device device_at(c10::DeviceIndex index) { return {kLagging, index}; }

/// 0 before use_lagging_device().
c10::DeviceIndex device_count();

struct Delays {
  uint64_t seed = 1;
  std::chrono::microseconds longest{0};
  double share = 0;
  uint64_t generation = 0;  ///< grows with every change
};
Delays current_delays();

/// Whether this launch of `what` loads the kernel first, see LaggingDeviceOptions. True once for
/// each kernel.
bool loads_kernel(c10::DeviceIndex device, std::string_view what);
void count_launch(c10::DeviceIndex device);
void count_replay(c10::DeviceIndex device);  // counts as one launch
void count_wait(c10::DeviceIndex device, std::string_view cause);

/// Sets the device's error unless it already has one.
void set_device_error(c10::DeviceIndex device, const std::string& message);
bool has_device_error(c10::DeviceIndex device);
/// Throws c10::Error if the device has an error.
void throw_device_error(c10::DeviceIndex device);

}  // namespace lockstep::testing
