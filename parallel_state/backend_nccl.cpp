#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "lockstep/parallel_state/backends.h"
#include "lockstep/parallel_state/devices.h"

namespace lockstep {

c10::intrusive_ptr<c10d::Backend> make_nccl_backend(const BackendSpec& spec, c10::Device device) {
  using Nccl = c10d::ProcessGroupNCCL;
  auto options = Nccl::Options::create();
  options->timeout = spec.timeout;
  options->group_name = spec.group_name;
  options->global_ranks_in_group.assign(spec.ranks.begin(), spec.ranks.end());
  auto backend = c10::make_intrusive<Nccl>(spec.store, spec.rank,
                                           static_cast<int>(spec.ranks.size()), options);
  backend->setBoundDeviceId(device);
  return backend;
}

int cuda_device_count() { return c10::cuda::device_count(); }

std::string nccl_version() { return c10d::getNcclVersion(); }

}  // namespace lockstep
