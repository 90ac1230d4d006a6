#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "lockstep/tests/support/device/device_generators.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_storage.h"
#include "lockstep/tests/support/device/device_streams.h"

namespace lockstep::testing {
namespace {

c10::DeviceIndex index_of(const c10::Device& device) {
  return device.has_index() ? device.index() : current_device();
}

class LaggingGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  c10::DeviceType type() const override { return kLagging; }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }

  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(index_of(device));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(index_of(device));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return pooled_stream(index_of(device));
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    return new_stream(index_of(device));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_current_stream(stream);
  }
  bool queryStream(const c10::Stream& stream) const override { return is_idle(stream); }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait_for_stream(stream, "synchronize stream");
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    wait_for_device(device, "synchronize device");
  }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex,
              c10::EventFlag) const override {
    auto recorded = std::make_unique<DeviceEvent>(DeviceEvent::record(stream));
    delete static_cast<DeviceEvent*>(*event);
    *event = recorded.release();
  }
  void block(void* event, const c10::Stream& stream) const override { of(event).block(stream); }
  bool queryEvent(void* event) const override { return of(event).query(); }
  void synchronizeEvent(void* event) const override { of(event).synchronize(); }
  double elapsedTime(void* first, void* second, c10::DeviceIndex) const override {
    const auto begin = of(first).time(), end = of(second).time();
    TORCH_CHECK(begin && end, "lagging device: elapsed time of an event that is not reached");
    return std::chrono::duration<double, std::milli>(*end - *begin).count();
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    delete static_cast<DeviceEvent*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_use(memory.get(), stream);
  }

 private:
  static const DeviceEvent& of(void* event) { return *static_cast<DeviceEvent*>(event); }
};

class LaggingHooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device >= 0 && device < device_count();
  }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = current_device();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }

  bool isPinnedPtr(const void* data) const override { return is_pinned_pointer(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Device getDeviceFromPtr(void* data) const override {
    const auto device = device_of_pointer(data);
    TORCH_CHECK(device, "lagging device: the pointer is not in its memory");
    return device_at(*device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return device_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

}  // namespace

void register_device_guard() {
  c10::SetAllocator(kLagging, device_allocator());
  c10::impl::registerDeviceGuard(kLagging, new LaggingGuard);
  at::setHostAllocator(kLagging, static_cast<at::HostAllocator*>(pinned_allocator()));
  at::RegisterPrivateUse1HooksInterface(new LaggingHooks);
}

}  // namespace lockstep::testing
