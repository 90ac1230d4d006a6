// One of the ranks of desync_test.py and of scripts/gpu_check. The first argument names the mistake
// of the last rank in step 3; with "unfinished", all ranks end before an operation has ended. The
// second argument is the tensors' device: cpu or cuda.

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/collectives.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace {

/// Five steps of four all-reduces. The host reads the sums.
void train(const lockstep::ParallelState& state, const std::string& mistake) {
  const lockstep::ProcessGroup dp = state.group(lockstep::GroupKind::dp);
  const bool last = state.rank() == state.world_size() - 1;
  std::vector<at::Tensor> tensors = {at::ones({8}, state.device())};
  dp.c10d_group()->allreduce(tensors)->wait();  // c10d records its own collectives
  for (int step = 1; step <= 5; ++step) {
    state.begin_step(step);
    const bool strays = last && step == 3;
    if (strays && mistake == "throw") throw std::runtime_error("a fault in step 3");
    for (int bucket = 0; bucket < 4; ++bucket) {
      if (strays && bucket == 2 && mistake == "skip") continue;
      if (strays && bucket == 2 && mistake == "die") ::raise(SIGKILL);
      const int64_t numel = strays && bucket == 2 && mistake == "size" ? 900 : 1000;
      const at::Tensor grads = at::ones({numel}, state.device());
      lockstep::Work work = lockstep::all_reduce(dp, grads, lockstep::ReduceOp::sum,
                                                 "bucket " + std::to_string(bucket));
      if (mistake == "unfinished" && step == 5) return;  // on all ranks
      work.wait();
      const auto sum = grads.sum().item<double>();
      state.check_failures();
      if (mistake != "size" && sum != 1000.0 * static_cast<double>(state.world_size()))
        throw std::runtime_error("a sum is " + std::to_string(sum));
    }
    state.check_in_step();
  }
}

void run(const std::string& mistake, const std::string& device) {
  lockstep::ParallelStateOptions options;
  options.timeout = std::chrono::seconds(3);
  if (device == "cuda") {  // which loads kernels before the first operation
    options.device = {c10::kCUDA, 0};
    options.timeout = std::chrono::seconds(15);
  }
  const lockstep::ParallelState state(lockstep::read_launch_environment(), options);
  try {
    train(state, mistake);
  } catch (const std::exception& error) {
    state.post_failure(error.what());
    throw;
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(argc > 1 ? argv[1] : "", argc > 2 ? argv[2] : "cpu");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(stderr);
    std::_Exit(1);
  }
}
