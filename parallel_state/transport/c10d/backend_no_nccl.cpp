#include "lockstep/core/check.h"
#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/devices.h"

namespace lockstep {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec) {
  fail<ConfigError>(
      "group {}: CUDA tensors were asked for, but this build has no CUDA "
      "(LOCKSTEP_CUDA)",
      spec.group_name);
}

int cuda_device_count() { return 0; }

std::string nccl_version() { return ""; }

}  // namespace lockstep
