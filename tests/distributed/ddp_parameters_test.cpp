// Parameters that are out of the ordinary: used twice, frozen, with gradients that are not finite;
// and the number of buckets.

#include <gtest/gtest.h>

#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::run_ranks;
using testing::SmallNet;

/// The table is used by the first and by the last operator, as a tied embedding is.
struct Tied : torch::nn::Module {
  Tied() {
    table = register_parameter("table", at::arange(12, at::kDouble).view({4, 3}) / 10);
    middle = register_parameter("middle", at::eye(3, at::kDouble) * 2);
  }
  at::Tensor loss(int64_t token) const {
    const at::Tensor hidden = at::linear(at::embedding(table, at::full({1}, token)), middle);
    return at::linear(hidden, table).square().sum();
  }
  at::Tensor table, middle;
};

TEST(DistributedDataParallel, AParameterUsedTwiceIsReducedOnceAndEarlyFromTheFirstStep) {
  Tied oracle;
  for (const int64_t token : {0, 1, 2}) oracle.loss(token).backward();
  for (const bool distributed : {false, true}) {
    CollectiveLog log;
    run_ranks(3,
              [&](const ParallelState& state) {
                Tied net;
                DistributedDataParallelConfig config;
                config.bucket_size = 1;
                config.use_distributed_optimizer = distributed;
                DistributedDataParallel ddp(net, state, config);
                for (int step = 0; step < 2; ++step) {
                  ddp.zero_grad_buffer();
                  const size_t before = log.of_rank(state.rank()).size();
                  net.loss(state.rank()).backward();
                  EXPECT_EQ(log.of_rank(state.rank()).size(), before + 2);  // inside backward
                  ddp.finish_grad_sync();
                  const ParamAndGradBuffer& buffer = *ddp.buffers()[0];
                  for (const size_t i : {0, 1}) {
                    const auto& slot = buffer.layout().slots[i];
                    const at::Tensor wanted = oracle.parameters()[i].grad().flatten();
                    for (const ElementRange& owned : buffer.owned()) {
                      const int64_t start = std::max(owned.start, slot.start);
                      const int64_t end = std::min(owned.end, slot.end);
                      if (start >= end) continue;
                      EXPECT_TRUE(at::allclose(
                          buffer.grad_data().slice(0, start, end),
                          wanted.slice(0, start - slot.start, end - slot.start), 1e-14));
                    }
                  }
                }
              },
              {.log = &log});
  }
}

TEST(DistributedDataParallel, FrozenParametersHaveNoPlaceInTheBuffers) {
  run_ranks(2, [](const ParallelState& state) {
    SmallNet net;
    net.parameters()[2].set_requires_grad(false);
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    DistributedDataParallel ddp(net, state, config);
    ASSERT_EQ(ddp.buffers().size(), 1u);
    EXPECT_EQ(ddp.buffers()[0]->params().size(), net.parameters().size() - 1);
    net.loss(SmallNet::samples(0, 2)).backward();
    ddp.finish_grad_sync();
    EXPECT_FALSE(net.parameters()[2].grad().defined());
  });
}

TEST(DistributedDataParallel, AGradientThatIsNotFiniteIsNamedBeforeItSpreads) {
  for (const bool overlap : {true, false}) {
    const auto errors = errors_of_ranks(3, [&](const ParallelState& state) {
      SmallNet net;
      DistributedDataParallelConfig config;
      config.check_for_nan_in_grad = true;
      config.overlap_grad_reduce = overlap;
      config.bucket_size = 30;
      DistributedDataParallel ddp(net, state, config);
      at::Tensor input = SmallNet::samples(0, 2);
      net.loss(input).backward();
      ddp.finish_grad_sync();
      ddp.zero_grad_buffer();
      if (state.rank() == 1) {
        const auto guard = ddp.no_sync();
        net.loss(input).backward();
        net.parameters()[2].mutable_grad().view(-1)[5] = std::numeric_limits<double>::infinity();
      }
      net.loss(input).backward();
      ddp.finish_grad_sync();
    });
    EXPECT_NE(errors[1].find("the gradient of 'weight1' on this rank has 1 elements of 28 that are "
                             "NaN or infinite, the first at 5"),
              std::string::npos)
        << errors[1];
    EXPECT_EQ(errors[1].find("gradient sync: bucket "), 0u) << errors[1];
    for (const int rank : {0, 2})
      EXPECT_NE(errors[rank].find("rank 1: gradient sync: bucket"), std::string::npos)
          << errors[rank];
  }
}

TEST(DistributedDataParallel, OneBucketWhereBucketingIsOff) {
  const auto buckets = [](const ParallelState& state, DistributedDataParallelConfig config,
                          bool disable_bucketing) {
    SmallNet net;
    return DistributedDataParallel(net, state, config, disable_bucketing).buckets().size();
  };
  DistributedDataParallelConfig config;
  config.num_buckets = 3;
  const ParallelState single = ParallelState::single_process();
  EXPECT_GE(buckets(single, config, false), 3u);
  EXPECT_EQ(buckets(single, config, true), 1u);
  config.num_buckets.reset();
  config.overlap_grad_reduce = false;
  EXPECT_EQ(buckets(single, config, false), 1u);
  config.bucket_size = 1;
  for (const int64_t rank : {0, 1})
    EXPECT_EQ(buckets(ParallelState::planning_rank({.world_size = 2, .pipeline = 2}, rank), config,
                      false),
              rank == 0 ? 6u : 1u);
}

}  // namespace
}  // namespace lockstep
