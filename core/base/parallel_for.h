#pragma once

// Internal.

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace lockstep {

/// Calls body(first, end) for parts of [begin, end), each of at least `grain` numbers, on up to
/// at::get_num_threads() threads. at::parallel_for() is compiled into its caller, and uses one
/// thread there unless the caller is compiled with OpenMP. This function is compiled with OpenMP by
/// GCC. Builds by other compilers, and those for ThreadSanitizer, which does not know libgomp, use
/// one thread.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace lockstep
