#pragma once

// Internal. No libtorch here.

#include <cstdint>

namespace lockstep {

/// The number of cores that this thread may use, at least 1. With taskset, under Slurm or in a
/// container these may be fewer than std::thread::hardware_concurrency(), which counts the host's.
int64_t usable_cores();

}  // namespace lockstep
