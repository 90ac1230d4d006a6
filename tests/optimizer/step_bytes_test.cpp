// The bytes that a training step sends and holds, compared with the formulas of the modes.

#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/memory_counter.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::run_ranks;

/// Matrices of `rows` rows of 64 elements whose gradients are constants.
struct Matrices : torch::nn::Module {
  Matrices(int64_t count, int64_t rows, at::ScalarType dtype) {
    for (int64_t i = 0; i < count; ++i)
      register_parameter("weight" + std::to_string(i),
                         at::full({rows, 64}, 0.5, at::TensorOptions(dtype)));
  }
  at::Tensor loss() const {
    at::Tensor total = at::zeros({}).requires_grad_(true);
    for (const at::Tensor& weight : parameters()) total = total + weight.sum();
    return total;
  }
};

struct StepMode {
  const char* name;
  at::ScalarType dtype;
  bool distributed;
  bool grads_in_fp32 = true;
  bool accumulate_in_fp32 = false;
  int64_t instances = 1;

  DistributedDataParallelConfig ddp(int64_t bucket_size) const {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = distributed;
    config.overlap_param_gather = distributed;
    config.grad_reduce_in_fp32 = grads_in_fp32;
    config.reduce_scatter_with_fp32_accumulation = accumulate_in_fp32;
    config.bucket_size = bucket_size;
    return config;
  }
  int64_t param_bytes() const { return static_cast<int64_t>(at::elementSize(dtype)); }
  int64_t grad_bytes() const { return grads_in_fp32 ? 4 : param_bytes(); }

  /// Bytes that one of d ranks sends for `numel` elements. A reduce-scatter and an all-gather send
  /// (d - 1) / d of the elements each, an all-reduce twice that. With several instances, the first
  /// two stay within an instance, and an all-reduce of a shard spans the instances.
  int64_t bytes_sent(int64_t numel, int64_t d) const {
    if (!distributed) return 2 * grad_bytes() * numel * (d - 1) / d;
    const int64_t inside = d / instances, shard = numel / inside;
    return (grad_bytes() + param_bytes()) * shard * (inside - 1) +
           2 * grad_bytes() * shard * (instances - 1) / instances;
  }
};

const StepMode kStepModes[] = {
    {"fp32, all-reduce: 8 (d - 1) / d", at::kFloat, false},
    {"fp32, sharded: 8 (d - 1) / d", at::kFloat, true},
    {"bf16, all-reduce: 8 (d - 1) / d", at::kBFloat16, false},
    {"bf16, sharded: 6 (d - 1) / d", at::kBFloat16, true},
    {"bf16 gradients, sharded: 4 (d - 1) / d", at::kBFloat16, true, false},
    {"bf16 gradients added in fp32, sharded: 4 (d - 1) / d", at::kBFloat16, true, false, true},
    {"bf16, two instances", at::kBFloat16, true, true, false, 2},
};

TEST(StepBytes, TheBackendsAreGivenExactlyTheBytesOfTheFormula) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  constexpr int64_t kCount = 4, kRows = 24, kNumel = kRows * 64;  // needs no padding for 2, 3, 4
  for (const int64_t d : {1, 2, 3, 4})
    for (const int64_t instances : {1, 2}) {
      if (d % instances != 0) continue;
      testing::BackendLog log;
      testing::RankThreadOptions options;
      options.sizes.optimizer_instances = instances;
      options.backend_log = &log;
      run_ranks(
          d,
          [&](const ParallelState& state) {
            for (const StepMode& mode : kStepModes) {
              if (mode.instances != instances) continue;
              Matrices net(kCount, kRows, mode.dtype);
              DistributedDataParallel ddp(net, state, mode.ddp(kNumel));
              ASSERT_EQ(ddp.buffers()[0]->layout().numel, kCount * kNumel);
              ASSERT_EQ(ddp.buckets().size(), 4u);
              const auto optimizer = make_optimizer({&ddp}, {});
              const size_t before = log.of_rank(state.rank()).size();
              ddp.set_num_microbatches(3);
              for (int i = 0; i < 3; ++i) net.loss().backward();
              finalize_model_grads({&ddp}, at::ones({}));
              optimizer->step();
              ddp.finish_param_sync();
              const auto calls = log.of_rank(state.rank());
              int64_t sent = 0, numbers = 0;  // for the tokens and the norm
              for (size_t i = before; i < calls.size(); ++i) {
                EXPECT_TRUE(calls[i].operation == "send" || calls[i].operation == "recv");
                if (calls[i].operation == "send")
                  (calls[i].bytes > 8 ? sent : numbers) += calls[i].bytes;
              }
              EXPECT_EQ(sent, mode.bytes_sent(kCount * kNumel, d)) << mode.name << ", d " << d;
              EXPECT_LE(numbers, 64 * (d - 1)) << mode.name << ", d " << d;
            }
          },
          options);
    }
}

TEST(StepBytes, ARunHoldsTheBytesOfTheFormulaAndAStepNoMore) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  constexpr int64_t kCount = 48, kRows = 512, kNumel = kCount * kRows * 64;
  struct Case {
    at::ScalarType dtype;
    bool distributed;
    double whole, cut;  ///< bytes per element: whole + cut / d
  };
  for (const int64_t d : {1, 2, 4})
    run_ranks(d, [&](const ParallelState& state) {
      for (const Case& run : {Case{at::kBFloat16, true, 6, 12}, Case{at::kBFloat16, false, 18, 0},
                              Case{at::kFloat, true, 8, 8}}) {
        testing::MemoryCounter memory;
        Matrices net(kCount, kRows, run.dtype);
        const StepMode mode = {"", run.dtype, run.distributed};
        DistributedDataParallel ddp(net, state, mode.ddp(kNumel / 8));
        const auto optimizer = make_optimizer({&ddp}, {});
        for (int step = 0; step < 3; ++step) {
          if (step == 1) memory.reset_peak();
          ddp.zero_grad_buffer();
          net.loss().backward();
          finalize_model_grads({&ddp}, at::ones({}));
          optimizer->step();
        }
        ddp.finish_param_sync();
        const double formula =
            static_cast<double>(kNumel) * (run.whole + run.cut / static_cast<double>(d));
        EXPECT_NEAR(static_cast<double>(memory.bytes()), formula, 0.01 * formula) << d;
        EXPECT_LE(static_cast<double>(memory.peak()), 1.01 * formula) << d;
      }
    });
}

}  // namespace
}  // namespace lockstep
