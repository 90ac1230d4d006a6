#pragma once

// Internal.

#include <string>

namespace lockstep {

/// Identifies the code that this process runs: version, and a digest of the linker's build ids of
/// the program and of the loaded Lockstep and libtorch libraries, "0.1.0 (1f3a...)". It differs
/// between ranks with different builds.
std::string build_identity();

}  // namespace lockstep
