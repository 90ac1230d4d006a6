#pragma once

#include <string>

/// Numbers as people read them. Needs no libtorch.
namespace lockstep {

/// "1:02:03", "2:03"
std::string format_duration(double seconds);

/// "731", "35.1k", "2.04M"
std::string with_unit(double value);

}  // namespace lockstep
