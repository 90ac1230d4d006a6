#pragma once

// The parts of gpu_bench, which scripts/gpu_check runs on a machine with a GPU. Every part also
// runs on the CPU, with `small` sizes, so that it can be tried without one.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include <c10/core/Device.h>

#include "lockstep/core/config.h"

namespace lockstep::benchmarks {

using Json = nlohmann::ordered_json;

/// Waits until the device has done what was launched.
void synchronize(c10::Device device);

/// Seconds of one call of `call`: the mean of `repeats`, after two that are not counted.
double mean_seconds(c10::Device device, int repeats, const std::function<void()>& call);

/// What the device and its libraries give: GB/s of a copy (read and written), TFLOP/s of bf16
/// matrix products at the shapes of a layer of the 1.3B model, and of a large square one.
Json measure_ceilings(c10::Device device, bool small);

/// Our kernels on large flat tensors: milliseconds and GB/s.
Json measure_kernels(c10::Device device, bool small);

/// Fused operations of a layer of the 1.3B model and its loss, in bf16, forward and backward,
/// against libtorch's operators that give the same: milliseconds and ratios.
Json measure_fused(c10::Device device, bool small);

/// Trains `config` on one rank. Writes a line of JSON with the number of parameters, then, for each
/// line of standard input that holds a number, trains so many steps and writes a line with their
/// milliseconds, the last loss and the most bytes of the device that were allocated in them.
void serve_steps(const Config& config, c10::Device device);

/// Three steps of `config` under Kineto, after three others: sums by kernel, launches, calls that
/// make the host wait, copies, and how long the device was idle.
Json profile_steps(const Config& config, c10::Device device);

}  // namespace lockstep::benchmarks
