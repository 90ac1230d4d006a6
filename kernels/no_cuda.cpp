#include "lockstep/kernels/device_kernels.h"

namespace lockstep::kernels {

DeviceKernels cuda_kernels() { return {}; }

}  // namespace lockstep::kernels
