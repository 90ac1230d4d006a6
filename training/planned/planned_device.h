#pragma once

// Internal.

#include <memory>

#include <c10/core/Device.h>

namespace lockstep {

/// While it lives, tensors on libtorch's meta device stand for those of a device with streams: they
/// have addresses of their own and no memory, operators work out shapes alone, events are those of
/// the PlannedHost of the thread, and what the host reads is what that says. One at a time in a
/// process; nobody else may use the meta device meanwhile. Several threads may, each for a rank.
class PlannedDevice {
 public:
  /// `of_cpu`: operators and tensors take the memory that they take on the CPU, not on a GPU.
  explicit PlannedDevice(bool of_cpu);
  ~PlannedDevice();
  PlannedDevice(const PlannedDevice&) = delete;
  PlannedDevice& operator=(const PlannedDevice&) = delete;

  static c10::Device device() { return c10::Device(c10::DeviceType::Meta); }

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
