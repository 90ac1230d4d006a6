#pragma once

// Internal.

#include <string>

namespace lockstep {

/// Names the code that this process runs: version, and a digest of the linker's build ids of the
/// program and of the Lockstep and libtorch libraries that are loaded, "0.1.0 (1f3a...)". Two ranks
/// with another build differ in it.
std::string build_identity();

}  // namespace lockstep
