#pragma once

// Internal.

#include <ATen/core/Generator.h>
#include <c10/core/Device.h>

namespace lockstep::testing {

/// The device's default generator: a CPU generator. Its numbers are drawn at launch.
const at::Generator& device_generator(c10::DeviceIndex device);

}  // namespace lockstep::testing
