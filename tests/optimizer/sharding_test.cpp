// Gradients, and parameters too, that are sharded over the data-parallel ranks
// (ddp.data_parallel_sharding_strategy): what is learnt and what is sent.

#include <gtest/gtest.h>

#include <map>

#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include "lockstep/tests/optimizer/sharded_run.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"

namespace lockstep {
namespace {

using testing::adamw;
using testing::CollectiveLog;
using testing::expect_close;
using testing::kClip;
using testing::kLending;
using testing::kSteps;
using testing::kTokensOfStep;
using testing::RankThreadOptions;
using testing::run_ranks;
using testing::ShardedRun;
using testing::train;
using testing::Training;
using testing::UnitNet;
using testing::Weights;

/// The same in one process, with plain libtorch and in double.
Weights train_plainly(const ShardedRun& run) {
  const UnitNet net(run.tied, at::kDouble, run.frozen);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& param : net.parameters())
    if (param.requires_grad())
      groups.emplace_back(Weights{param}, std::make_unique<torch::optim::AdamWOptions>(
                                              torch::optim::AdamWOptions(0.01)
                                                  .betas({adamw(0).adam_beta1, adamw(0).adam_beta2})
                                                  .weight_decay(param.dim() > 1 ? 0.1 : 0)));
  torch::optim::AdamW optimizer(groups);
  Weights trained;
  for (const at::Tensor& param : net.parameters())
    if (param.requires_grad()) trained.push_back(param);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = at::zeros({}, at::kDouble);
    // The ranks' pieces are adjacent; together they are this text.
    loss = net.loss(step * kTokensOfStep, kTokensOfStep);
    (loss / static_cast<double>(kTokensOfStep)).backward();
    torch::nn::utils::clip_grad_norm_(trained, kClip);
    optimizer.step();
  }
  Weights list;
  for (const at::Tensor& param : net.parameters()) list.push_back(param.detach().clone());
  return list;
}
TEST(Sharding, EveryStrategyFollowsPlainLibtorchInDouble) {
  for (const bool tied : {false, true})
    for (const bool frozen : {false, true}) {
      const Weights expected = train_plainly({.tied = tied, .frozen = frozen});
      for (const int64_t ranks : {1, 2, 3, 4})
        run_ranks(ranks, [&](const ParallelState& state) {
          for (const ShardingStrategy strategy : kLending)
            for (const int64_t microbatches : {1, 3})
              for (const bool ahead : {false, true}) {
                ShardedRun run{.strategy = strategy,
                               .ahead = ahead,
                               .microbatches = microbatches,
                               .tied = tied,
                               .frozen = frozen,
                               .counted = ahead};
                if (ahead != tied) run.bucket_size = 40;
                expect_close(train(state, run), expected, 1e-12,
                             run.text() + ", ranks " + std::to_string(ranks));
              }
        });
    }
}

TEST(Sharding, OptimizerInstancesShardInsideAndReplicateAcross) {
  const Weights expected = train_plainly({});
  RankThreadOptions options;
  options.sizes.optimizer_instances = 2;
  run_ranks(
      4,
      [&](const ParallelState& state) {
        for (const ShardingStrategy strategy : kLending)
          for (const int64_t microbatches : {1, 3})
            expect_close(
                train(state, {.strategy = strategy, .ahead = true, .microbatches = microbatches}),
                expected, 1e-12, to_string(strategy));
      },
      options);
}

/// Without clipping, because other ranks hold the norm's terms.
TEST(Sharding, TheBitsAreThoseOfTheDistributedOptimizer) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t ranks : {2, 3, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        for (const int64_t microbatches : {1, 3}) {
          ShardedRun run{.microbatches = microbatches, .clip = 0};
          const Weights expected = train(state, run, dtype);
          for (const ShardingStrategy strategy : kLending)
            for (const bool ahead : {false, true}) {
              run.strategy = strategy;
              run.ahead = ahead;
              const Weights found = train(state, run, dtype);
              for (size_t i = 0; i < found.size(); ++i)
                EXPECT_TRUE(at::equal(found[i], expected[i]))
                    << run.text() << ", " << at::toString(dtype) << ", parameter " << i;
            }
        }
    });
}

/// Calls and bytes of rank 0 in one step, by operation.
struct Sent {
  int64_t calls = 0, bytes = 0;
};
using SentByOperation = std::map<std::string, Sent>;

/// The calls in step `measured` on two ranks. `bytes_of_units`: bytes of all elements of each unit.
SentByOperation sent_in_step(const ShardedRun& run, int measured,
                             std::vector<int64_t>& bytes_of_units) {
  CollectiveLog log;
  size_t before = 0, after = 0;
  RankThreadOptions options;
  options.log = &log;
  run_ranks(
      2,
      [&](const ParallelState& state) {
        Training training(state, run);
        for (int step = 0; step <= measured; ++step) {
          if (state.rank() == 0 && step == measured) before = log.of_rank(0).size();
          training.step();
          if (state.rank() == 0 && step == measured) after = log.of_rank(0).size();
        }
        if (state.rank() != 0) return;
        bytes_of_units.clear();
        for (const ParamAndGradBuffer* buffer : training.ddp.buffers())
          bytes_of_units.push_back(buffer->layout().numel * 8);
      },
      options);
  const auto calls = log.of_rank(0);
  SentByOperation sent;
  for (size_t i = before; i < after; ++i) {
    if (calls[i].group != "dp-cp" && calls[i].group != "dp") continue;
    Sent& one = sent[calls[i].operation.substr(0, calls[i].operation.find(' '))];
    ++one.calls;
    one.bytes += calls[i].bytes;
  }
  return sent;
}

int64_t sum(const std::vector<int64_t>& list) {
  int64_t total = 0;
  for (const int64_t one : list) total += one;
  return total;
}

TEST(Sharding, EachUnitIsGatheredForForwardAndForBackwardAndReducedOnce) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  std::vector<int64_t> units;  // last unit first: head, layers, table
  ShardedRun run{.strategy = ShardingStrategy::optim_grads_params};
  // The head stays for its backward, and backward does not read the table.
  SentByOperation sent = sent_in_step(run, 3, units);
  ASSERT_EQ(units.size(), 5U);
  const int64_t layers = units[1] + units[2] + units[3];
  EXPECT_EQ(sent["all_gather"].calls, 5 + 3);
  EXPECT_EQ(sent["all_gather"].bytes, (sum(units) + layers) / 2);
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);
  EXPECT_EQ(sent["reduce_scatter"].bytes, sum(units));

  // With gathers ahead, the layer below the head stays too.
  run.ahead = true;
  sent = sent_in_step(run, 3, units);
  EXPECT_EQ(sent["all_gather"].calls, 5 + 2);
  EXPECT_EQ(sent["all_gather"].bytes, (sum(units) + units[2] + units[3]) / 2);
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);

  // Of three micro-batches, the second and the third still find the first layer, which the previous
  // backward used last. With it, they find the table, gathered ahead.
  run.microbatches = 3;
  sent = sent_in_step(run, 3, units);
  EXPECT_EQ(sent["all_gather"].calls, (5 + 2) + 2 * (4 + 2));
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);

  // A table that is also the head stays from its last use in forward to its first in backward.
  run = {.strategy = ShardingStrategy::optim_grads_params, .tied = true};
  sent = sent_in_step(run, 3, units);
  ASSERT_EQ(units.size(), 4U);
  EXPECT_EQ(sent["all_gather"].calls, 5 + 3);
}

TEST(Sharding, GradientsAloneAreSentAsByTheDistributedOptimizer) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  std::vector<int64_t> units;
  const SentByOperation expected = sent_in_step({.bucket_size = 40}, 2, units);
  const SentByOperation found =
      sent_in_step({.strategy = ShardingStrategy::optim_grads, .bucket_size = 40}, 2, units);
  ASSERT_FALSE(expected.empty());
  ASSERT_EQ(found.size(), expected.size());
  for (const auto& [operation, sent] : expected) {
    EXPECT_EQ(found.at(operation).calls, sent.calls) << operation;
    EXPECT_EQ(found.at(operation).bytes, sent.bytes) << operation;
  }
}

/// A unit's shard is updated before the unit is gathered from it.
TEST(Sharding, TheStepOfTheOptimizerGathersTheFirstUnitAlone) {
  CollectiveLog log;
  RankThreadOptions options;
  options.log = &log;
  run_ranks(
      3,
      [&](const ParallelState& state) {
        Training training(state, {.strategy = ShardingStrategy::optim_grads_params, .ahead = true});
        for (int step = 0; step < 3; ++step) {
          training.backwards();
          finalize_model_grads({&training.ddp}, at::full({}, 12, at::kLong));
          const size_t before = log.of_rank(state.rank()).size();
          training.optimizer->step();
          const auto calls = log.of_rank(state.rank());
          int gathers = 0;
          for (size_t i = before; i < calls.size(); ++i) {
            if (!calls[i].operation.starts_with("all_gather")) continue;
            ++gathers;
            EXPECT_NE(calls[i].label.find("'table.weight'"), std::string::npos) << calls[i].label;
          }
          EXPECT_EQ(gathers, 1);
        }
      },
      options);
}

}  // namespace
}  // namespace lockstep
