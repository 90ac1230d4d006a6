#pragma once

// Internal: the CUDA part of kernels/.

#include "lockstep/kernels/device_graph.h"
#include "lockstep/kernels/device_kernels.h"

namespace lockstep::kernels {

struct CudaPart {
  DeviceKernels kernels;
  MakeDeviceGraph graphs;
};

}  // namespace lockstep::kernels
