#include <gtest/gtest.h>

#include <cstdio>

#include <ATen/Parallel.h>

#include "lockstep/parallel_state/parallel_state.h"

// Main of the tests on libtorch: one thread per rank, and no pass without a test.
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  at::set_num_threads(1);
  lockstep::prepare_rank_threads();
  const int status = RUN_ALL_TESTS();
  if (testing::UnitTest::GetInstance()->test_to_run_count() == 0) {
    std::fputs("no test matches the filter\n", stderr);
    return 1;
  }
  return status;
}
