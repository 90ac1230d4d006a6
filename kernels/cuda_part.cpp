#include "lockstep/kernels/cuda_part.h"

#include "lockstep/core/cuda_libraries.h"

namespace lockstep::kernels {
namespace {

CudaPart load() { return cuda_part<CudaPart>("lockstep_kernels_cuda"); }

}  // namespace

DeviceKernels cuda_kernels() { return load().kernels; }

MakeDeviceGraph cuda_graphs() { return load().graphs; }

}  // namespace lockstep::kernels
