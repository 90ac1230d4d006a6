#include <c10/cuda/CUDAFunctions.h>
#include <c10/util/env.h>
#include <torch/csrc/distributed/c10d/NCCLUtils.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "lockstep/parallel_state/nccl_part.h"

namespace lockstep {
namespace {

void set_if(const std::optional<int64_t>& value, int& target) {
  if (value) target = static_cast<int>(*value);
}

/// Otherwise NCCL's bootstrap would listen on an interface that other hosts can reach.
void stay_on_loopback(const BackendSpec& spec) {
  if (spec.single_host) c10::utils::set_env("NCCL_SOCKET_IFNAME", "lo", /*overwrite=*/false);
}

/// DeviceWatch explains failures and aborts. If c10d's watchdog sees a failure first, it holds a
/// lock that every new operation takes for four times the first of these values. Then, or after an
/// error of the device, it ends the process unless the other two say otherwise. What the user has
/// set stays.
void leave_failures_to_us() {
  c10::utils::set_env("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000", /*overwrite=*/false);
  c10::utils::set_env("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", /*overwrite=*/false);
  c10::utils::set_env("TORCH_NCCL_RETHROW_CUDA_ERRORS", "0", /*overwrite=*/false);
}

c10::intrusive_ptr<c10d::Backend> make_backend(const BackendSpec& spec) {
  using Nccl = c10d::ProcessGroupNCCL;
  stay_on_loopback(spec);
  leave_failures_to_us();
  auto options = Nccl::Options::create(spec.options.high_priority_stream);
  options->timeout = spec.timeout;
  set_if(spec.options.min_ctas, options->config.minCTAs);
  set_if(spec.options.max_ctas, options->config.maxCTAs);
  set_if(spec.options.cga_cluster_size, options->config.cgaClusterSize);
  options->group_name = spec.group_name;
  options->global_ranks_in_group.assign(spec.ranks.begin(), spec.ranks.end());
  return c10::make_intrusive<Nccl>(spec.store, spec.rank, static_cast<int>(spec.ranks.size()),
                                   options);
}

/// The copy that c10d makes for its own watchdog.
c10::intrusive_ptr<c10d::Work> work_without_outputs(const c10d::Work& work) {
  using NcclWork = c10d::ProcessGroupNCCL::WorkNCCL;
  const auto* const nccl = dynamic_cast<const NcclWork*>(&work);
  return nccl ? c10::make_intrusive<NcclWork>(*nccl) : nullptr;
}

}  // namespace

extern "C" void lockstep_parallel_state_cuda(NcclPart& part) {
  part = {.make_backend = make_backend,
          .device_count = [] { return static_cast<int>(c10::cuda::device_count()); },
          .version = [] { return c10d::getNcclVersion(); },
          .work_without_outputs = work_without_outputs};
}

}  // namespace lockstep
