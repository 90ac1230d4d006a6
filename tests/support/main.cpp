#include <gtest/gtest.h>
#include <sched.h>

#include <cstdio>
#include <sstream>
#include <string>

#include <ATen/Parallel.h>

#include "lockstep/parallel_state/parallel_state.h"

/// The source files whose tests a program of a group runs, "distributed/ddp_test.cpp;..."; null:
/// all of them.
extern const char lockstep_own_test_files[] __attribute__((weak));

namespace {

bool is_own(const testing::TestInfo& test) {
  const std::string file = test.file();
  std::istringstream own(lockstep_own_test_files);
  for (std::string name; std::getline(own, name, ';');)
    if (file.ends_with("/" + name)) return true;
  return false;
}

/// Excludes the other tests by the filter.
void run_own_tests_alone() {
  const testing::UnitTest& all = *testing::UnitTest::GetInstance();
  std::string& filter = testing::GTEST_FLAG(filter);
  if (filter.find('-') == std::string::npos) filter += '-';
  for (int i = 0; i < all.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); ++k)
      if (!is_own(*suite.GetTestInfo(k)))
        filter += ":" + std::string(suite.name()) + "." + suite.GetTestInfo(k)->name();
  }
}

}  // namespace

// Main of the tests on libtorch: one thread per rank, and an error if no test runs. Ranks outnumber
// the cores here, so a waking thread must not preempt another (see backend_gloo.cpp).
int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  if (lockstep_own_test_files) run_own_tests_alone();
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
