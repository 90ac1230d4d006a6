#include "lockstep/tests/support/device/lagging_device.h"

#include <array>
#include <atomic>
#include <mutex>
#include <set>

#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/DeviceType.h>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_generators.h"
#include "lockstep/tests/support/device/device_registration.h"
#include "lockstep/tests/support/device/device_state.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/without_onednn.h"

namespace lockstep::testing {
namespace {

struct DeviceState {
  std::mutex mutex;
  DeviceCounts counts;
  std::optional<std::string> error;
  std::atomic<bool> has_error{false};
  std::set<std::string, std::less<>> loaded;  ///< kernels that are loaded
  at::Generator generator = at::detail::createCPUGenerator();
};

struct Configuration {
  std::mutex mutex;
  Delays delays;
  std::atomic<uint64_t> generation{0};
  std::atomic<int> devices{0};
  std::atomic<bool> loads_kernels{false};
};

// Neither is destroyed: streams use them during process exit.
Configuration& configuration() {
  static auto* const value = new Configuration;
  return *value;
}
DeviceState& state_of(c10::DeviceIndex device) {
  static auto* const states = new std::array<DeviceState, kMaxDevices>;
  return states->at(static_cast<size_t>(device));
}

void check_options(const LaggingDeviceOptions& options, int registered) {
  const int most = registered > 0 ? registered : kMaxDevices;
  require<UsageError>(options.devices >= 1 && options.devices <= most,
                      "use_lagging_device: devices: found {}, allowed: 1 to {}{}", options.devices,
                      most, registered > 0 ? ", as in the first call" : "");
  require<UsageError>(options.delayed >= 0 && options.delayed <= 1,
                      "use_lagging_device: delayed: found {}, allowed: 0 to 1", options.delayed);
}

void register_device(int devices) {
  configuration().devices = devices;
  c10::register_privateuse1_backend("lagging");  // before the hooks, or autograd does not see them
  register_device_guard();
  register_device_operators();
  register_lockstep_kernels();
  register_lagging_graphs();
}

}  // namespace

void use_lagging_device(const LaggingDeviceOptions& options) {
  Configuration& config = configuration();
  const std::lock_guard<std::mutex> lock(config.mutex);
  check_options(options, config.devices);
  if (config.devices == 0) register_device(options.devices);
  config.delays = {options.seed, options.longest_delay, options.delayed, ++config.generation};
  config.loads_kernels = options.loads_kernels;
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    DeviceState& state = state_of(device);
    const std::lock_guard<std::mutex> state_lock(state.mutex);
    state.loaded.clear();
  }
}

c10::Device lagging_device(int index) {
  require<UsageError>(index >= 0 && index < device_count(),
                      "lagging_device: found index {}, allowed: 0 to {}", index,
                      static_cast<int>(device_count()) - 1);
  return device_at(static_cast<c10::DeviceIndex>(index));
}

DeviceCounts operator-(DeviceCounts after, const DeviceCounts& before) {
  after.launches -= before.launches;
  after.waits -= before.waits;
  for (const auto& [cause, times] : before.waits_by) after.waits_by[cause] -= times;
  std::erase_if(after.waits_by, [](const auto& entry) { return entry.second == 0; });
  return after;
}

DeviceCounts device_counts(int index) {
  DeviceState& state = state_of(lagging_device(index).index());
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.counts;
}

void reset_device_counts() {
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    DeviceState& state = state_of(device);
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.counts = {};
  }
}

std::optional<std::string> device_error(int index) {
  DeviceState& state = state_of(lagging_device(index).index());
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.error;
}

void clear_device_errors() {
  wait_for_all_streams();
  for (c10::DeviceIndex device = 0; device < device_count(); ++device) {
    DeviceState& state = state_of(device);
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.error.reset();
    state.has_error = false;
  }
}

c10::DeviceIndex device_count() {
  return static_cast<c10::DeviceIndex>(configuration().devices.load());
}

Delays current_delays() {
  const std::lock_guard<std::mutex> lock(configuration().mutex);
  return configuration().delays;
}

bool loads_kernel(c10::DeviceIndex device, std::string_view what) {
  if (!configuration().loads_kernels || what.starts_with("nccl ")) return false;
  DeviceState& state = state_of(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.loaded.emplace(what).second;
}

void count_launch(c10::DeviceIndex device) {
  DeviceState& state = state_of(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  ++state.counts.launches;
}

void count_replay(c10::DeviceIndex device) {
  DeviceState& state = state_of(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  ++state.counts.launches;
  ++state.counts.replays;
}

void count_wait(c10::DeviceIndex device, std::string_view cause) {
  DeviceState& state = state_of(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  ++state.counts.waits;
  ++state.counts.waits_by[std::string(cause)];
}

void set_device_error(c10::DeviceIndex device, const std::string& message) {
  DeviceState& state = state_of(device);
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (!state.error) state.error = message;
  state.has_error = true;
}

bool has_device_error(c10::DeviceIndex device) { return state_of(device).has_error; }

void throw_device_error(c10::DeviceIndex device) {
  if (!has_device_error(device)) return;
  const auto error = device_error(device);
  TORCH_CHECK(!error, "an earlier kernel failed: ", *error);
}

const at::Generator& device_generator(c10::DeviceIndex device) {
  return state_of(device).generator;
}

}  // namespace lockstep::testing
