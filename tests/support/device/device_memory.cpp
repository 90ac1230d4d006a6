#include "lockstep/tests/support/device/device_memory.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/CachingDeviceAllocator.h>

#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/memory_pool.h"

namespace lockstep::testing {
namespace {

void free_block(void* pointer) { MemoryPool::instance().free(pointer); }

class LaggingAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::DeviceIndex device = current_device();
    void* const data = MemoryPool::instance().allocate(bytes, current_stream(device));
    return {data, data, &free_block, device_at(device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_stream(current_device()), "copy_data",
            [=, this] { default_copy_data(to, from, bytes); });
  }

  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
    record_use(memory.get(), stream);
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const DeviceBytes bytes = device_bytes(device);
    stats.allocated_bytes[0].increase(static_cast<size_t>(bytes.peak));
    stats.allocated_bytes[0].decrease(static_cast<size_t>(bytes.peak - bytes.live));
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex device) override { reset_peak_bytes(device); }
};

class PinnedAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* const data = MemoryPool::instance().allocate(bytes, std::nullopt);
    return {data, data, &free_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    if (!is_pinned_pointer(pointer)) return false;
    record_use(pointer, stream);
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

void* data_of(const at::Tensor& tensor) {
  auto* const start = static_cast<char*>(tensor.storage().mutable_data());
  return start + static_cast<size_t>(tensor.storage_offset()) * tensor.itemsize();
}

}  // namespace

at::Tensor host_view(const at::Tensor& on_device) {
  if (!on_device.defined()) return {};
  void* const data = on_device.numel() == 0 ? nullptr : data_of(on_device);
  at::Tensor view = at::from_blob(data, on_device.sizes(), on_device.strides(),
                                  at::TensorOptions(on_device.scalar_type()));
  if (on_device.unsafeGetTensorImpl()->is_wrapped_number())
    view.unsafeGetTensorImpl()->set_wrapped_number(true);
  return view;
}

void check_pointer(const at::Tensor& tensor, c10::DeviceIndex current) {
  if (!tensor.defined() || tensor.numel() == 0) return;
  const void* const data = tensor.storage().data();
  TORCH_CHECK(MemoryPool::instance().holds_live(data, current),
              "lagging device: an illegal memory access was encountered: a kernel on ",
              device_at(current), " was given memory of a tensor on ", tensor.device());
}

std::optional<c10::DeviceIndex> device_of_pointer(const void* pointer) {
  return MemoryPool::instance().device_of(pointer);
}

bool is_pinned_pointer(const void* pointer) {
  return MemoryPool::instance().holds_live(pointer, std::nullopt);
}

void record_use(const void* pointer, const c10::Stream& stream) {
  MemoryPool::instance().record_use(pointer, stream);
}

c10::Allocator* device_allocator() {
  static auto* const allocator = new LaggingAllocator;
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator;
  return allocator;
}

DeviceBytes device_bytes(c10::DeviceIndex device) {
  return MemoryPool::instance().bytes_of(device);
}
void reset_peak_bytes(c10::DeviceIndex device) { MemoryPool::instance().reset_peak(device); }

}  // namespace lockstep::testing
