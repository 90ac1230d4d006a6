#pragma once

// Internal.

#include <string>

namespace lockstep {

/// The message of the exception that is being handled, whatever its type, without libtorch's
/// backtrace.
std::string text_of_exception();

}  // namespace lockstep
