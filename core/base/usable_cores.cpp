#include "lockstep/core/usable_cores.h"

#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <thread>
#include <vector>

namespace lockstep {

int64_t usable_cores() {
  // The kernel refuses a set with room for fewer CPUs than it supports; one cpu_set_t has 1024.
  constexpr size_t kMostSets = 1024;
  for (size_t count = 1; count <= kMostSets; count *= 2) {
    std::vector<cpu_set_t> sets(count);
    const size_t bytes = count * sizeof(cpu_set_t);
    if (::sched_getaffinity(0, bytes, sets.data()) == 0)
      return std::max<int64_t>(1, CPU_COUNT_S(bytes, sets.data()));
    if (errno != EINVAL) break;
  }
  return std::max<int64_t>(1, std::thread::hardware_concurrency());
}

}  // namespace lockstep
