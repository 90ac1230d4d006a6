#pragma once

#include <cstdint>
#include <string>

#include <c10/core/Device.h>

namespace lockstep {

/// Bytes that this process holds: of a CUDA device, as its allocator has reserved them; otherwise
/// of the host's memory (VmRSS and VmHWM of /proc/self/status).
struct MemoryUse {
  int64_t bytes = 0;
  int64_t peak_bytes = 0;  ///< the most at any time since the process began
};
MemoryUse memory_use(c10::Device device);

/// "NVIDIA H100 80GB HBM3": the model of this host's GPUs, as NVIDIA's driver tells it, one entry
/// each in `folder`. Empty where it tells nothing, or of several models.
std::string gpu_model(const std::string& folder = "/proc/driver/nvidia/gpus");

}  // namespace lockstep
