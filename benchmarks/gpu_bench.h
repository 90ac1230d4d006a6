#pragma once

// The parts of gpu_bench, which scripts/gpu_check runs on a machine with a GPU. Every part also
// runs on the CPU, with `small` sizes, so that it can be tried without a GPU.

#include <functional>
#include <nlohmann/json.hpp>
#include <string>

#include <c10/core/Device.h>

#include "lockstep/core/config.h"

namespace lockstep::benchmarks {

using Json = nlohmann::ordered_json;

/// Waits until the device has finished the launched work.
void synchronize(c10::Device device);

/// Returns the mean seconds of `repeats` calls of `call`, after two calls that are not timed.
double mean_seconds(c10::Device device, int repeats, const std::function<void()>& call);

/// The ceilings of the device and its libraries: GB/s of a copy (read and written), TFLOP/s of bf16
/// matrix products at the shapes of a layer of the 1.3B model, and of a large square one.
Json measure_ceilings(c10::Device device, bool small);

/// Our kernels on large flat tensors: milliseconds and GB/s.
Json measure_kernels(c10::Device device, bool small);

/// Fused operations of a layer of the 1.3B model and its loss, in bf16, forward and backward,
/// against the equivalent libtorch operators: milliseconds and ratios.
Json measure_fused(c10::Device device, bool small);

/// Trains `config` on one rank. Writes a line of JSON with the number of parameters. Then reads
/// numbers from standard input: for each, trains that many steps and writes a line with the mean
/// milliseconds of a step, the last loss and the peak of allocated device memory in bytes.
void serve_steps(const Config& config, c10::Device device);

/// Profiles three steps of `config` with Kineto, after three others: sums by kernel, launches,
/// calls that make the host wait, copies, and how long the device was idle.
Json profile_steps(const Config& config, c10::Device device);

}  // namespace lockstep::benchmarks
