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
#include "lockstep/training/supported_config.h"

/// From a configuration and a launch environment to the parts of a run.
namespace lockstep {

/// Throws ConfigError, naming the fields, if something does not fit `world_size` ranks: the sizes
/// of the axes, the batch, its micro-batches or the pipeline's schedule.
void check_layout(const Config& config, int64_t world_size);

/// Call it before any CUDA call, including choose_device(). For a deterministic run that may use
/// CUDA devices it sets NCCL_ALGO=^NVLS, unless the variable is set: NVLink switches may add in
/// another order each time, and the first groups are made before the Trainer, which makes libtorch
/// deterministic. For a pipeline that may run on CUDA devices it sets
/// CUDA_DEVICE_MAX_CONNECTIONS=32, unless the variable is set: a receive that waits for its stage
/// is a running kernel and must not keep the kernels of other streams out of a shared queue.
/// Megatron wants 1 queue for tensor parallelism on Hopper and earlier, so that a collective starts
/// ahead of the matrix product that it overlaps; that affects only speed.
void prepare_cuda(const Config& config);

/// The device of this process, which sees `visible` CUDA devices (cuda_device_count() if unset),
/// according to `choice`; `auto` takes CUDA if it sees any. A rank that sees one device takes it,
/// as when a launcher gives each rank one; with several, rank i of a host takes device i.
/// ConfigError: several devices, but fewer than ranks on this host; no device although CUDA is
/// asked for, and why.
c10::Device choose_device(DeviceChoice choice, const LaunchEnvironment& environment,
                          std::optional<int64_t> visible = std::nullopt);

/// Waits for what runs on `device`. Returns why the process can use it no more, if an error of the
/// device, such as an illegal address, has ended the process's context; nothing otherwise, and on
/// the CPU.
std::optional<std::string> error_of_device(c10::Device device);

/// A note to the user of a run on the CPU if `choice` is auto and NVIDIA's driver lists GPUs, each
/// as one entry in `folder`; empty otherwise.
std::string unused_gpus(DeviceChoice choice, c10::Device device,
                        const std::string& folder = "/proc/driver/nvidia/gpus");

/// A note to the user if labels are ignored (train.task = sft, data.eod_mask_loss), which makes the
/// router losses of `config` stronger than their coefficients (see RouterLosses); empty otherwise.
std::string stronger_router_losses(const Config& config);

/// The dtype of the parameters.
at::ScalarType parameter_dtype(Precision precision);

/// How the ranks form groups and meet. They announce every field of `config`, as completed by
/// resolve_for_device(): if two ranks differ, the construction of ParallelState throws on all of
/// them. On a device the messages between stages take 4 blocks each, unless parallel.group_options
/// bounds them. ConfigError names the field of `parallel` that cannot be used.
ParallelStateOptions parallel_options(const Config& config, c10::Device device);

}  // namespace lockstep
