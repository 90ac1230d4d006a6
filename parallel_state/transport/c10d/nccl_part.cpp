#include "lockstep/parallel_state/nccl_part.h"

#include "lockstep/core/check.h"
#include "lockstep/core/cuda_libraries.h"
#include "lockstep/parallel_state/devices.h"

namespace lockstep {
namespace {

const NcclPart& nccl_part() {
  static const NcclPart part = [] {
    check_cuda_libraries();
    return cuda_part<NcclPart>("lockstep_parallel_state_cuda");
  }();
  return part;
}

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec) {
  const auto make = nccl_part().make_backend;
  require<ConfigError>(make != nullptr,
                       "group {}: CUDA tensors were requested, but this process has no CUDA ({})",
                       spec.group_name, why_no_cuda());
  return make(spec);
}

int cuda_device_count() {
  const auto count = nccl_part().device_count;
  return count ? count() : 0;
}

c10::intrusive_ptr<c10d::Work> nccl_work_without_outputs(const c10d::Work& work) {
  const auto without_outputs = nccl_part().work_without_outputs;
  return without_outputs ? without_outputs(work) : nullptr;
}

std::string nccl_version() {
  const auto version = nccl_part().version;
  return version ? version() : "";
}

}  // namespace lockstep
