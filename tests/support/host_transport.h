#pragma once

#include <gtest/gtest.h>

#include "lockstep/parallel_state/cpu_traits.h"

/// Skips a test of properties that only the host transport has: sums with the bits of rank order,
/// its messages and the memory that they take, and messages of a wrong size that do not end the
/// process.
#define LOCKSTEP_NEEDS_HOST_TRANSPORT()                                                       \
  if (!lockstep::sums_in_rank_order())                                                        \
  GTEST_SKIP()                                                                                \
      << "this build has plain Gloo's collectives, which add in an order of their own, take " \
         "memory of their own and end the process at a message of another size "              \
         "(LOCKSTEP_HOST_TRANSPORT=OFF)"
