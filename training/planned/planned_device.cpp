#include "lockstep/training/planned_device.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "lockstep/core/planned_cpu.h"
#include "lockstep/training/planned_host.h"
#include "lockstep/training/planned_operators.h"

namespace lockstep {
namespace {

thread_local PlannedHost* current_host = nullptr;

constexpr size_t kAlignment = 512;  // of CUDA's allocator

size_t multiple(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

/// Gives unique addresses, but no memory.
class PlannedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const size_t address = next_.fetch_add(multiple(bytes, kAlignment) + kAlignment);
    PlannedHost* const host = PlannedHost::current();
    const auto memory = host && !OnPlannedHost::is_active() ? host->memory() : nullptr;
    const size_t taken = plans_cpu() ? bytes : multiple(bytes, kAlignment);
    auto* const block = new Block{static_cast<int64_t>(taken), memory};
    block->count(block->bytes);
    return {reinterpret_cast<void*>(address), block, &release, c10::Device(c10::DeviceType::Meta)};
  }
  void copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const override {}

 private:
  struct Block {
    int64_t bytes;
    std::shared_ptr<PlannedMemory> memory;

    void count(int64_t more) const {
      if (!memory) return;
      memory->bytes += more;
      memory->peak = std::max(memory->peak, memory->bytes);
    }
  };

  static void release(void* context) {
    const std::unique_ptr<Block> block(static_cast<Block*>(context));
    block->count(-block->bytes);
  }

  std::atomic<size_t> next_ = size_t{1} << 40;
};

/// Streams and events of the planned device.
struct PlannedGuard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::Meta> {
  using Stream = c10::Stream;
  static Stream only_stream() {
    return Stream(Stream::DEFAULT, c10::Device(c10::DeviceType::Meta, 0));
  }

  Stream getStream(c10::Device /*device*/) const noexcept override { return only_stream(); }
  Stream getDefaultStream(c10::Device /*device*/) const override { return only_stream(); }
  Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override {
    return only_stream();
  }
  void record(void** event, const Stream& /*stream*/, c10::DeviceIndex /*index*/,
              c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new uint32_t;
    const PlannedHost* const host = PlannedHost::current();
    *static_cast<uint32_t*>(*event) = host ? host->stream_position() : 0;
  }
  void block(void* /*event*/, const Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    delete static_cast<uint32_t*>(event);
  }
  void synchronizeEvent(void* event) const override {
    if (PlannedHost* const host = PlannedHost::current())
      host->wait_for_stream(*static_cast<uint32_t*>(event));
  }
  void synchronizeDevice(c10::DeviceIndex /*index*/) const override {
    if (PlannedHost* const host = PlannedHost::current())
      host->wait_for_stream(host->stream_position());
  }
  double elapsedTime(void* /*first*/, void* /*second*/, c10::DeviceIndex /*index*/) const override {
    return 0;
  }
};

}  // namespace

PlannedHost::PlannedHost() { current_host = this; }

PlannedHost::~PlannedHost() { current_host = nullptr; }

PlannedHost* PlannedHost::current() { return current_host; }

struct PlannedDevice::Impl {
  explicit Impl(bool of_cpu) : cpu(of_cpu) {}

  PlansCpu cpu;
  std::vector<torch::Library> operators = planned_operators();
  c10::Allocator* allocator = c10::GetAllocator(c10::DeviceType::Meta);
  const c10::impl::DeviceGuardImplInterface* guard =
      c10::impl::getDeviceGuardImpl(c10::DeviceType::Meta);
};

PlannedDevice::PlannedDevice(bool of_cpu) : impl_(std::make_unique<Impl>(of_cpu)) {
  // Both outlive every tensor and event that they made.
  static PlannedAllocator allocator;
  static const PlannedGuard guard;
  c10::SetAllocator(c10::DeviceType::Meta, &allocator);
  c10::impl::registerDeviceGuard(c10::DeviceType::Meta, &guard);
  kernels::register_device_kernels(c10::DeviceType::Meta, planned_kernels());
}

PlannedDevice::~PlannedDevice() {
  kernels::register_device_kernels(c10::DeviceType::Meta, {});
  c10::impl::registerDeviceGuard(c10::DeviceType::Meta, impl_->guard);
  c10::SetAllocator(c10::DeviceType::Meta, impl_->allocator);
}

}  // namespace lockstep
