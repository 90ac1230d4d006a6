#pragma once

#include <string>

namespace lockstep {

/// The number of CUDA devices that this process sees; 0 if CUDA is not loaded, see
/// cuda_libraries.h. ConfigError if loading it failed.
int cuda_device_count();

/// NCCL's version as "2.28.9"; empty if CUDA is not loaded.
std::string nccl_version();

}  // namespace lockstep
