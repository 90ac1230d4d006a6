#pragma once

#include <string>

namespace lockstep {

/// The number of CUDA devices that this process sees; 0 in a build without CUDA.
int cuda_device_count();

/// NCCL's version as "2.28.9"; empty in a build without CUDA.
std::string nccl_version();

}  // namespace lockstep
