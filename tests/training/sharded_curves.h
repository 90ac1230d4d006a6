#pragma once

#include <gtest/gtest.h>

#include "lockstep/distributed/block_pool.h"
#include "lockstep/planner/memory_plan.h"
#include "lockstep/tests/training/layout_curves.h"

/// The reference GPT with sharded gradients and parameters (ddp.data_parallel_sharding_strategy):
/// its curves and its memory.
namespace lockstep::testing {

using Overrides = std::vector<std::string>;

inline const Overrides kOptim = {"ddp.use_distributed_optimizer=true"};
inline const Overrides kGrads = {"ddp.use_distributed_optimizer=true",
                                 "ddp.data_parallel_sharding_strategy=optim_grads"};
inline const Overrides kParams = {"ddp.use_distributed_optimizer=true",
                                  "ddp.data_parallel_sharding_strategy=optim_grads_params"};
inline const char* const kAhead = "ddp.overlap_param_gather=true";

inline Overrides with(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

inline const char *const kTensor = "tensor_model_parallel_size=2",
                         *const kPipeline = "pipeline_model_parallel_size=2",
                         *const kExpert = "expert_model_parallel_size=2",
                         *const kContext = "context_parallel_size=2",
                         *const kSequence = "sequence_parallel=true";

class ShardedTrainingTest : public LayoutCurvesTest {
 protected:
  /// Compares `strategies` with one process that shards nothing.
  void expect_all_equal(const Overrides& model, int64_t world, const Overrides& layout,
                        const std::vector<Overrides>& strategies = all_strategies()) const {
    const std::vector<double> expected = curve(config(model, {}), 1);
    for (const Overrides& strategy : strategies) {
      SCOPED_TRACE(fmt::format("{} ranks: {}, {}, {}", world, fmt::join(model, " "),
                               fmt::join(layout, " "), fmt::join(strategy, " ")));
      const std::vector<double> found = curve(config(with(model, strategy), layout), world);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < expected.size(); ++i)
        ASSERT_NEAR(found[i], expected[i], 1e-12 * std::abs(expected[i])) << i;
      EXPECT_LT(expected[expected.size() - 3], expected[0]);
    }
  }

  static std::vector<Overrides> all_strategies() {
    return {with(kGrads, {"ddp.bucket_size=300"}), kParams, with(kParams, {kAhead}),
            with(kParams, {kAhead, "ddp.bucket_size=300"})};
  }

  /// Expects the losses of the sharded optimizer, bit for bit. (Norms add up other pieces.)
  void expect_bits_of_optim(const Overrides& model, int64_t world, const Overrides& layout) const {
    const std::vector<double> expected = curve(config(with(model, kOptim), layout), world);
    for (const Overrides& strategy : {kGrads, kParams, with(kParams, {kAhead})}) {
      const std::vector<double> found = curve(config(with(model, strategy), layout), world);
      ASSERT_EQ(found.size(), expected.size());
      for (size_t i = 0; i < expected.size(); i += 2)
        EXPECT_EQ(found[i], expected[i])
            << i << fmt::format(": {}, {}", fmt::join(layout, " "), fmt::join(strategy, " "));
    }
  }

  /// Compares the memory that a rank keeps and the peak of what it borrows in three steps to the
  /// plan.
  static void expect_memory_as_planned(const Config& job, int64_t world) {
    const MemoryPlan plan = plan_memory(job, world);
    RankThreadOptions options;
    options.sizes = parallel_options(job, c10::kCPU).sizes;
    run_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(job, state);
          for (int step = 0; step < 3; ++step) trainer.train_step();
          const int64_t stage = state.group(GroupKind::pp).rank();
          const StageMemory& planned = plan.stages.at(static_cast<size_t>(stage));
          int64_t kept = 0;
          const BlockPool* pool = nullptr;
          for (const DistributedDataParallel* ddp : trainer.training_model().wrappers())
            for (const ParamAndGradBuffer* buffer : ddp->buffers()) {
              kept += buffer->kept_param_bytes() + buffer->kept_grad_bytes();
              if (buffer->pool() != nullptr) pool = buffer->pool();
            }
          ASSERT_NE(pool, nullptr);
          const int64_t lent = planned.parameter_bytes + planned.gradient_bytes - kept;
          const auto peak = static_cast<int64_t>(pool->peak_bytes());
          EXPECT_LE(peak, lent + lent / 4);  // a block may be a quarter larger than requested
          EXPECT_GE(peak, lent / 2);
        },
        options);
  }
};

}  // namespace lockstep::testing
