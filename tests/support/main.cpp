#include <gtest/gtest.h>
#include <sched.h>

#include <cstdio>

#include <ATen/Parallel.h>

#include "lockstep/parallel_state/parallel_state.h"

// Main of the tests on libtorch: one thread per rank, and no pass without a test. Ranks outnumber
// the cores here, so no thread interrupts another when it wakes (see backend_gloo.cpp).
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  const sched_param parameters{};
  sched_setscheduler(0, SCHED_BATCH, &parameters);
  lockstep::prepare_rank_threads();
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fputs("no test matches the filter\n", stderr);
    return 1;
  }
  return status;
}
