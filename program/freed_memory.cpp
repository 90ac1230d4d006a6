#include <malloc.h>

#include "lockstep/program/commands.h"

namespace lockstep {

void keep_freed_memory() {
  constexpr int kLargestAllowed = 32 << 20;
  ::mallopt(M_MMAP_THRESHOLD, kLargestAllowed);
  ::mallopt(M_TRIM_THRESHOLD, 1 << 30);
}

}  // namespace lockstep
