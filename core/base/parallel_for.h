#pragma once

// Internal.

#include <cstdint>

#include <c10/util/FunctionRef.h>

namespace lockstep {

/// Calls body(first, end) for parts of [begin, end), each of `grain` numbers at least, on up to
/// at::get_num_threads() threads. at::parallel_for() is compiled into whoever calls it, and takes
/// one thread there unless that is compiled with OpenMP; this one is, by GCC. Builds by other
/// compilers and those for ThreadSanitizer, which does not know libgomp, take one thread.
void parallel_for(int64_t begin, int64_t end, int64_t grain,
                  c10::function_ref<void(int64_t, int64_t)> body);

}  // namespace lockstep
