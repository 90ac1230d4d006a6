#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/devices.h"

namespace lockstep {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec, c10::Device) {
  fail<ConfigError>(
      "group {}: CUDA tensors were asked for, but this build has no CUDA "
      "(LOCKSTEP_CUDA)",
      spec.group_name);
}

c10d::ReduceOp nccl_scaled_sum(double /*factor*/) {
  fail<UsageError>("found a sum of CUDA tensors, but this build has no CUDA (LOCKSTEP_CUDA)");
}

int cuda_device_count() { return 0; }

std::string nccl_version() { return ""; }

}  // namespace lockstep
