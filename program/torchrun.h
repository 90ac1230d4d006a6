#pragma once

#include <string>
#include <vector>

/// torchrun as a starter for `lockstep launch`. Nothing here needs libtorch.
namespace lockstep {

/// The first torchrun that works: that of the Python environment in which this program is installed
/// as a wheel, otherwise one in a folder on PATH. Empty if there is none. A Python script works if
/// the Python that it names has torch; anything else works if `torchrun --help` exits with 0.
std::string find_torchrun();

/// Replaces this process. Throws UsageError if that fails.
[[noreturn]] void become(const std::vector<std::string>& command);

}  // namespace lockstep
