#pragma once

// Internal: the libraries for CUDA, libtorch's and ours, which only a process with a driver loads.

#include <string>

namespace lockstep {

/// Loads libtorch_cuda; returns why it cannot, "" where it is loaded or this build has no CUDA.
/// Before main() this library calls it where the driver, libcuda.so.1, can be loaded; the
/// environment variable LOCKSTEP_LOAD_CUDA says otherwise: 1 without a driver as well, 0 never.
/// Later calls are for programs that have not asked libtorch for CUDA yet.
std::string load_cuda_libraries();

/// Why this process has no CUDA; "" where it has.
std::string why_no_cuda();

/// ConfigError if the call before main() failed, if one of our libraries cannot be loaded, and for
/// a value of LOCKSTEP_LOAD_CUDA that is not 0, nor 1 in a build with CUDA.
void check_cuda_libraries();

/// The function `name` of our library lib<name>.so, which lies beside this one. Null where
/// libtorch_cuda is not loaded. ConfigError if the library cannot be loaded.
void* find_cuda_part(const char* name);

/// The functions of a room that need CUDA, all null where find_cuda_part() finds nothing: its
/// library has an extern "C" function of its own name, which fills them in.
template <typename Functions>
Functions cuda_part(const char* name) {
  Functions functions{};
  if (void* const found = find_cuda_part(name))
    reinterpret_cast<void (*)(Functions&)>(found)(functions);
  return functions;
}

}  // namespace lockstep
