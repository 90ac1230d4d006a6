#include "lockstep/kernels/device_kernels.h"

#include <array>

#include "lockstep/core/check.h"

namespace lockstep::kernels {
namespace {

using KernelTable = std::array<DeviceKernels, c10::COMPILE_TIME_MAX_DEVICE_TYPES>;

KernelTable& kernel_table() {
  static KernelTable table = [] {
    KernelTable made;
    made[static_cast<size_t>(c10::DeviceType::CUDA)] = cuda_kernels();
    return made;
  }();
  return table;
}

}  // namespace

const DeviceKernels* find_device_kernels(c10::DeviceType type) {
  const DeviceKernels& found = kernel_table()[static_cast<size_t>(type)];
  return found.adamw ? &found : nullptr;
}

const DeviceKernels& device_kernels(const char* kernel, c10::DeviceType type) {
  const DeviceKernels* const found = find_device_kernels(type);
  require<UsageError>(found != nullptr,
                      "{}: found tensors on {}, for which this build has no kernels; allowed: the "
                      "CPU, CUDA in a build with LOCKSTEP_CUDA",
                      kernel, c10::DeviceTypeName(type, /*lower_case=*/true));
  return *found;
}

void register_device_kernels(c10::DeviceType type, const DeviceKernels& kernels) {
  kernel_table()[static_cast<size_t>(type)] = kernels;
}

}  // namespace lockstep::kernels
