// A training step allocates nothing of the size of the buffers.

#include <gtest/gtest.h>
#include <malloc.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::run_ranks;

/// Page faults of the process, so of all ranks together.
int64_t page_faults() {
  rusage usage = {};
  ::getrusage(RUSAGE_SELF, &usage);
  return usage.ru_minflt;
}

constexpr int64_t kParameters = 64, kNumel = kParameters * 256 * 256;

/// Gives every allocation of a megabyte or more fresh pages, while smaller ones reuse theirs.
/// Otherwise, the allocator adapts to the sizes it sees, and may return pages at any time.
void fault_on_large_allocations() {
  ASSERT_EQ(::mallopt(M_MMAP_THRESHOLD, 1 << 20), 1);
  ASSERT_EQ(::mallopt(M_TRIM_THRESHOLD, 1 << 30), 1);
}

/// Parameters whose gradients are constants, so backward needs hardly any memory.
struct Wide : torch::nn::Module {
  explicit Wide(at::ScalarType dtype) {
    for (int i = 0; i < kParameters; ++i)
      register_parameter("weight" + std::to_string(i),
                         at::full({256, 256}, 0.5, at::TensorOptions(dtype)));
  }
  at::Tensor loss() const {
    at::Tensor total = at::zeros({}).requires_grad_(true);
    for (const at::Tensor& weight : parameters()) total = total + weight.sum();
    return total;
  }
};

/// Page faults of all ranks in ten steps, after three other steps.
int64_t faults_of_ten_steps(bool overlap_gather, at::ScalarType dtype) {
  int64_t faults = 0;
  run_ranks(2, [&](const ParallelState& state) {
    Wide net(dtype);
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    config.overlap_param_gather = overlap_gather;
    config.bucket_size = kNumel / 4;
    DistributedDataParallel ddp(net, state, config);
    const auto optimizer = make_optimizer({&ddp}, {});
    const auto step = [&] {
      ddp.zero_grad_buffer();
      net.loss().backward();
      finalize_model_grads({&ddp}, at::ones({}));
      optimizer->step();
    };
    const auto run_steps = [&](int count) {
      for (int i = 0; i < count; ++i) step();
      barrier(state.world(), "steps");
    };
    run_steps(3);
    const int64_t before = page_faults();
    run_steps(10);
    if (state.rank() == 0) faults = page_faults() - before;
  });
  return faults;
}

/// The least of three runs: allocations of a step cause faults in every run, the machine (when it
/// splits a huge page) only in some.
int64_t least_faults_of_ten_steps(bool overlap_gather, at::ScalarType dtype) {
  int64_t least = faults_of_ten_steps(overlap_gather, dtype);
  for (int again = 0; again < 2; ++again)
    least = std::min(least, faults_of_ten_steps(overlap_gather, dtype));
  return least;
}

TEST(StepMemory, NothingOfTheSizeOfABufferIsAllocatedInAStep) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "the sanitizer's own memory causes page faults";
#endif
  fault_on_large_allocations();
  const int64_t pages = kNumel * 4 / ::getpagesize();  // of one fp32 buffer
  EXPECT_LT(least_faults_of_ten_steps(true, at::kFloat), pages / 20);
  EXPECT_LT(least_faults_of_ten_steps(false, at::kBFloat16), pages / 20);
}

}  // namespace
}  // namespace lockstep
