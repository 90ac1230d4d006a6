#include <ATen/ATen.h>
#include <ATen/cuda/CUDAContext.h>

#include "lockstep/core/check.h"
#include "lockstep/kernels/cuda_kernels.h"
#include "lockstep/kernels/fp8.h"

namespace lockstep::kernels {

at::Tensor scaled_mm_cuda(const Fp8Matrix& a, const Fp8Matrix& b,
                          const std::optional<at::Tensor>& bias, at::ScalarType dtype,
                          bool fast_sums) {
  const auto* const device = at::cuda::getCurrentDeviceProperties();
  require<UsageError>(device->major >= 9 || (device->major == 8 && device->minor >= 9),
                      "products in 8-bit floats: found a GPU of compute capability {}.{}, allowed: "
                      "8.9, or from 9.0 on",
                      device->major, device->minor);
  return at::_scaled_mm(a.values, b.values.t(), a.inverse_scales, b.inverse_scales.t(), bias,
                        /*scale_result=*/{}, dtype, fast_sums);
}

}  // namespace lockstep::kernels
