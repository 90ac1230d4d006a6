#pragma once

#include <optional>
#include <string>

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/datasets/batch_sizes.h"
#include "lockstep/parallel_state/devices.h"
#include "lockstep/parallel_state/launch_environment.h"
#include "lockstep/parallel_state/parallel_state.h"

/// From a configuration and a launch environment to what a run is built of.
namespace lockstep {

/// Throws ConfigError naming the field for what the configuration may say but `train` cannot do,
/// and for layers that cannot be cut into stages; see stage_layout().
void check_supported(const Config& config);

/// Throws ConfigError naming the fields for what does not fit `world_size` ranks: sizes of the
/// axes, the batch, its micro-batches and the pipeline's schedule.
void check_layout(const Config& config, int64_t world_size);

/// Before anything of CUDA is called, choose_device() included. For a pipeline that may run on CUDA
/// devices sets CUDA_DEVICE_MAX_CONNECTIONS=32, unless it is set: a receive that waits for its
/// stage is a kernel that runs, and must not keep the kernels of other streams out of a shared
/// queue. Megatron wants 1 queue for tensor parallelism on Hopper and before, so that a collective
/// starts ahead of the product beside it; that is a matter of speed alone.
void prepare_cuda(const Config& config);

/// The device of this process, which sees `visible` CUDA devices (cuda_device_count() if unset): by
/// `choice`; `auto` takes CUDA where it sees any. A rank that sees one device takes it, as ranks do
/// that a launcher gives one each; with several, rank i of a host takes device i. ConfigError:
/// several devices, but fewer than ranks of this host; none although CUDA is asked for, and why.
c10::Device choose_device(DeviceChoice choice, const LaunchEnvironment& environment,
                          std::optional<int64_t> visible = std::nullopt);

/// What a run on the CPU tells its user where `choice` is auto and NVIDIA's driver lists GPUs, one
/// entry each in `folder`; empty otherwise.
std::string unused_gpus(DeviceChoice choice, c10::Device device,
                        const std::string& folder = "/proc/driver/nvidia/gpus");

/// The dtype of the parameters.
at::ScalarType parameter_dtype(Precision precision);

/// How the ranks are cut and meet. They announce every field of `config`, as resolve_for_device()
/// completes it: where two ranks differ, the construction of ParallelState throws on all of them.
/// On a device the messages between stages take 4 blocks each, unless parallel.group_options bounds
/// them. ConfigError names the field of `parallel` that cannot be used.
ParallelStateOptions parallel_options(const Config& config, c10::Device device);

}  // namespace lockstep
