#pragma once

#include <string>
#include <vector>

/// torchrun as the starter of `lockstep launch`. Nothing here needs libtorch.
namespace lockstep {

/// The first torchrun that works: of the Python environment in which this program is installed as a
/// wheel, else of a folder on PATH. Empty where there is none. A script works where the Python that
/// it names has torch; what is no Python script, where `torchrun --help` exits with 0.
std::string find_torchrun();

/// Replaces this process. Throws UsageError where that fails.
[[noreturn]] void become(const std::vector<std::string>& command);

}  // namespace lockstep
