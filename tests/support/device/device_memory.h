#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

/// Memory of the lagging device, and pinned host memory. Every byte holds 0xFF when the memory is
/// handed out, and again after it is freed: in device memory once the stream that it was allocated
/// on has run its queued work, in pinned memory at once. A block is not reused while a stream that
/// was recorded for it still has work to do.
namespace lockstep::testing {

/// A CPU tensor over the memory of a tensor on the device. Like a kernel, it does NOT keep the
/// memory alive. Throws c10::Error if the storage is closed. Undefined if the tensor is.
at::Tensor host_view(const at::Tensor& on_device);

/// Throws c10::Error, an illegal memory access, unless the tensor's memory is live memory of
/// `current`, the device on whose stream a kernel with its pointer is launched. Undefined and empty
/// tensors pass.
void check_pointer(const at::Tensor& tensor, c10::DeviceIndex current);

/// The device whose memory holds `pointer`, live or not; nullopt for host memory.
std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer);
/// Whether `pointer` is in live pinned memory.
bool is_pinned_pointer(const void* pointer);

/// The block of `pointer`, on the device or pinned, is not handed out again until `stream` has run
/// the work that is queued on it when the block is freed. Does nothing for other memory.
void record_use(const void* pointer, const c10::Stream& stream);

/// Allocates on the current stream of the current device. A c10::DeviceAllocator.
c10::Allocator* device_allocator();
/// An at::HostAllocator.
c10::Allocator* pinned_allocator();

/// Bytes of live tensors on the device: now, and the peak since the last reset.
struct DeviceBytes {
  int64_t live = 0;
  int64_t peak = 0;
};
DeviceBytes device_bytes(c10::DeviceIndex device);
void reset_peak_bytes(c10::DeviceIndex device);

}  // namespace lockstep::testing
