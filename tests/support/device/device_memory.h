#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

/// Memory of the lagging device and pinned memory of the host. Both hold 0xFF in every byte when
/// they are handed out, and again from when they are free: device memory once the stream that it
/// was allocated on has done what it had to do, pinned memory at once. A block stays out of use
/// while a stream that was recorded with it has work to do.
namespace lockstep::testing {

/// A CPU tensor over the memory of a tensor on the device. Does NOT keep the memory, as a kernel
/// does not. c10::Error where the storage is closed. Undefined for an undefined tensor.
at::Tensor host_view(const at::Tensor& on_device);

/// c10::Error, an illegal memory access, if the tensor's memory is not live memory of `current`,
/// the device on whose stream a kernel that takes its pointer is launched. Undefined and empty
/// tensors pass.
void check_pointer(const at::Tensor& tensor, c10::DeviceIndex current);

/// The device whose memory holds `pointer`, live or not; nothing for memory of the host.
std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer);
/// Whether `pointer` is in live pinned memory.
bool is_pinned_pointer(const void* pointer);

/// The block of `pointer`, device or pinned, is not handed out again before `stream` has done what
/// it has to do at the time when the block is freed. Nothing for other memory.
void record_use(const void* pointer, const c10::Stream& stream);

/// Of the current device, on its current stream. A c10::DeviceAllocator.
c10::Allocator* device_allocator();
/// An at::HostAllocator.
c10::Allocator* pinned_allocator();

/// Bytes of live tensors on the device, now and at most since the last reset.
struct DeviceBytes {
  int64_t live = 0;
  int64_t peak = 0;
};
DeviceBytes device_bytes(c10::DeviceIndex device);
void reset_peak_bytes(c10::DeviceIndex device);

}  // namespace lockstep::testing
