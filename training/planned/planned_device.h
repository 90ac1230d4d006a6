#pragma once

// Internal.

#include <memory>

#include <c10/core/Device.h>

namespace lockstep {

/// While it lives, tensors on libtorch's meta device represent those of a device with streams: they
/// have their own addresses and no memory, operators compute only shapes, and the PlannedHost of
/// the thread provides the events and whatever the host reads. Only one may exist at a time in a
/// process, and nothing else may use the meta device meanwhile. Several threads may use it, each
/// for one rank.
class PlannedDevice {
 public:
  /// `of_cpu`: operators and tensors take the memory that they would take on the CPU, not on a GPU.
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
