#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace lockstep {

/// Bytes that this process holds: on a CUDA device, what its allocator has reserved; otherwise host
/// memory (VmRSS and VmHWM of /proc/self/status).
struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;  ///< the most at any time since the process began
};
MemoryUse memory_use(c10::Device device);

/// "NVIDIA H100 80GB HBM3": the model of this host's GPUs according to NVIDIA's driver, which has
/// one entry per GPU in `folder`. Empty if it lists none, or several models.
std::string gpu_model(const std::string& folder = "/proc/driver/nvidia/gpus");

}  // namespace lockstep
