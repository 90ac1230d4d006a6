#pragma once

#include <string>

namespace lockstep {

/// Versions of the libraries that stay out of the public headers, as "3.21.12".
std::string protobuf_version();
std::string fmt_version();

}  // namespace lockstep
