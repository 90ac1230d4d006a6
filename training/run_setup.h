#pragma once

#include <ATen/core/ScalarType.h>
#include <c10/core/Device.h>

#include "lockstep/core/config.h"
#include "lockstep/datasets/batch_sizes.h"
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

/// The device of this process: by `choice`; `auto` takes CUDA where every rank of this host has a
/// device of its own. ConfigError if CUDA is asked for and there are too few devices.
c10::Device choose_device(DeviceChoice choice, const LaunchEnvironment& environment);

/// The dtype of the parameters.
at::ScalarType parameter_dtype(Precision precision);

/// How the ranks are cut and meet. They announce every field of `config`: where two ranks differ,
/// the construction of ParallelState throws on all of them. ConfigError names the field of
/// `parallel` that cannot be used.
ParallelStateOptions parallel_options(const Config& config, c10::Device device);

/// Bytes that this process holds: of its device, on the CPU of its memory.
int64_t memory_bytes(c10::Device device);

}  // namespace lockstep
