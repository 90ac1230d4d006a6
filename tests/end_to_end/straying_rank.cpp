// One of the ranks of desync_test.py. In step 3 the last rank strays, as the argument says.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace {

void run(const std::string& mistake) {
  lockstep::ParallelStateOptions options;
  options.timeout = std::chrono::milliseconds(3000);
  const lockstep::ParallelState state(lockstep::read_launch_environment(), options);
  const lockstep::ProcessGroup dp = state.group(lockstep::GroupKind::dp);
  const bool last = state.rank() == state.world_size() - 1;
  std::vector<at::Tensor> tensors = {at::ones({8})};
  dp.c10d_group()->allreduce(tensors)->wait();  // c10d records its own collectives
  for (int step = 1; step <= 5; ++step) {
    state.begin_step(step);
    const bool strays = last && step == 3;
    for (int bucket = 0; bucket < 4; ++bucket) {
      if (strays && bucket == 2 && mistake == "skip") continue;
      if (strays && bucket == 2 && mistake == "die") ::raise(SIGKILL);
      const int64_t numel = strays && bucket == 2 && mistake == "size" ? 900 : 1000;
      const at::Tensor grads = at::ones({numel});
      lockstep::all_reduce(dp, grads, lockstep::ReduceOp::sum, "bucket " + std::to_string(bucket))
          .wait();
    }
    state.check_in_step();
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(stderr);
    std::_Exit(1);
  }
}
