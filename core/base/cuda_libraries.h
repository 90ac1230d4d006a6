#pragma once

// Internal: the libraries for CUDA, libtorch's and ours, which only a process with a driver loads.

#include <string>

namespace lockstep {

/// Loads libtorch_cuda; returns why it cannot, or "" if it is loaded or this build has no CUDA.
/// Before main() this library calls it if the driver, libcuda.so.1, can be loaded. The environment
/// variable LOCKSTEP_LOAD_CUDA overrides this: 1 calls it without a driver as well, 0 never does.
/// Later calls are for programs that have not asked libtorch for CUDA yet.
std::string load_cuda_libraries();

/// Why this process has no CUDA; "" if it has.
std::string why_no_cuda();

/// ConfigError if the call before main() failed, if one of our libraries cannot be loaded, and for
/// a value of LOCKSTEP_LOAD_CUDA that is not 0, nor 1 in a build with CUDA.
void check_cuda_libraries();

/// The function `name` of our library lib<name>.so, which is in the same folder as this one. Null
/// if libtorch_cuda is not loaded. ConfigError if the library cannot be loaded.
void* find_cuda_part(const char* name);

/// The functions of a folder that need CUDA, all null if find_cuda_part() finds nothing: its
/// library has an extern "C" function of its own name, which fills them in.
template <typename Functions>
Functions cuda_part(const char* name) {
  Functions functions{};
  if (void* const found = find_cuda_part(name))
    reinterpret_cast<void (*)(Functions&)>(found)(functions);
  return functions;
}

}  // namespace lockstep
