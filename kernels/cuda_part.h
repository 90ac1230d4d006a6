#pragma once

// Internal: what kernels/ has for CUDA.

#include "lockstep/kernels/device_graph.h"
#include "lockstep/kernels/device_kernels.h"

namespace lockstep::kernels {

struct CudaPart {
  DeviceKernels kernels;
  MakeDeviceGraph graphs;
};

}  // namespace lockstep::kernels
