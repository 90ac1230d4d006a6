// Gradients, and parameters too, that the data-parallel ranks share out
// (ddp.data_parallel_sharding_strategy): what is learnt, what is sent, what lies in memory, and what
// is refused.

#include <gtest/gtest.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <map>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/tests/optimizer/sharded_net.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::RankThreadOptions;
using testing::run_ranks;
using testing::throws_with;
using testing::UnitNet;
using Weights = std::vector<at::Tensor>;

constexpr int kSteps = 6;
constexpr int64_t kTokensOfStep = 36;  // divisible by ranks and micro-batches
constexpr double kClip = 0.3;

struct Case {
  ShardingStrategy strategy = ShardingStrategy::optim;
  bool ahead = false;
  int64_t microbatches = 1;
  bool tied = false;
  bool frozen = false;
  bool counted = false;  ///< micro-batches are counted, not stated by no_sync()
  std::optional<int64_t> bucket_size = {};
  double clip = kClip;

  DistributedDataParallelConfig ddp() const {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    config.data_parallel_sharding_strategy = strategy;
    config.overlap_param_gather = ahead;
    config.bucket_size = bucket_size;
    return config;
  }
  std::string text() const {
    return std::string(to_string(strategy)) + ", ahead " + std::to_string(ahead) +
           ", micro-batches " + std::to_string(microbatches) + ", tied " + std::to_string(tied) +
           ", frozen " + std::to_string(frozen) + ", counted " + std::to_string(counted);
  }
};

OptimizerConfig adamw(double clip) {
  OptimizerConfig config;
  config.lr = 0.01;
  config.weight_decay = 0.1;
  config.clip_grad = clip;
  return config;
}

/// A model at work on one rank.
class Training {
 public:
  Training(const ParallelState& state, const Case& run, at::ScalarType dtype = at::kDouble)
      : run_(run),
        net(run.tied, dtype, run.frozen),
        ddp(net, state, run.ddp()),
        optimizer(make_optimizer({&ddp}, adamw(run.clip))) {
    if (run.counted) ddp.set_num_microbatches(run.microbatches);
  }

  void backwards() {
    const ParallelState& state = ddp.parallel_state();
    ddp.zero_grad_buffer();
    const int64_t share = kTokensOfStep / state.world_size(), size = share / run_.microbatches;
    for (int64_t i = 0; i < run_.microbatches; ++i) {
      std::optional<DistributedDataParallel::NoSyncGuard> guard;
      if (!run_.counted && i + 1 < run_.microbatches) guard.emplace(ddp.no_sync());
      const int64_t first = step_ * kTokensOfStep + state.rank() * share + i * size;
      net.loss(first, size).backward();
    }
    ++step_;
  }
  void step() {
    backwards();
    const int64_t world = ddp.parallel_state().world_size();
    finalize_model_grads({&ddp}, at::full({}, kTokensOfStep / world, at::kLong));
    EXPECT_FALSE(optimizer->step().skipped);
  }
  Weights weights() {
    ddp.unshard();
    Weights list;
    for (const at::Tensor& param : net.parameters()) list.push_back(param.detach().clone());
    ddp.reshard();
    return list;
  }

 private:
  Case run_;
  int step_ = 0;

 public:
  UnitNet net;
  DistributedDataParallel ddp;
  std::unique_ptr<Optimizer> optimizer;
};

Weights train(const ParallelState& state, const Case& run, at::ScalarType dtype = at::kDouble) {
  Training training(state, run, dtype);
  for (int step = 0; step < kSteps; ++step) training.step();
  return training.weights();
}

/// In one process of plain libtorch and in double.
Weights train_plainly(const Case& run) {
  const UnitNet net(run.tied, at::kDouble, run.frozen);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const at::Tensor& param : net.parameters())
    if (param.requires_grad())
      groups.emplace_back(
          Weights{param}, std::make_unique<torch::optim::AdamWOptions>(
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
    // As the ranks see them: a piece ends where the next one begins.
    loss = net.loss(step * kTokensOfStep, kTokensOfStep);
    (loss / static_cast<double>(kTokensOfStep)).backward();
    torch::nn::utils::clip_grad_norm_(trained, kClip);
    optimizer.step();
  }
  Weights list;
  for (const at::Tensor& param : net.parameters()) list.push_back(param.detach().clone());
  return list;
}

void expect_close(const Weights& found, const Weights& expected, double tolerance,
                  const std::string& what) {
  ASSERT_EQ(found.size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_LE((found[i].to(at::kDouble) - expected[i]).abs().max().item<double>(),
              tolerance * expected[i].abs().max().item<double>())
        << what << ", parameter " << i;
}

constexpr ShardingStrategy kLending[] = {ShardingStrategy::optim_grads,
                                         ShardingStrategy::optim_grads_params};

TEST(Sharding, EveryStrategyFollowsPlainLibtorchInDouble) {
  for (const bool tied : {false, true})
    for (const bool frozen : {false, true}) {
      const Weights expected = train_plainly({.tied = tied, .frozen = frozen});
      for (const int64_t ranks : {1, 2, 3, 4})
        run_ranks(ranks, [&](const ParallelState& state) {
          for (const ShardingStrategy strategy : kLending)
            for (const int64_t microbatches : {1, 3})
              for (const bool ahead : {false, true}) {
                Case run{.strategy = strategy, .ahead = ahead, .microbatches = microbatches,
                        .tied = tied, .frozen = frozen, .counted = ahead};
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
            expect_close(train(state, {.strategy = strategy, .ahead = true,
                                       .microbatches = microbatches}),
                         expected, 1e-12, to_string(strategy));
      },
      options);
}

/// Without clipping: the norm's terms lie on other ranks.
TEST(Sharding, TheBitsAreThoseOfTheDistributedOptimizer) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  for (const int64_t ranks : {2, 3, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      for (const at::ScalarType dtype : {at::kFloat, at::kBFloat16})
        for (const int64_t microbatches : {1, 3}) {
          Case run{.microbatches = microbatches, .clip = 0};
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

/// Of step number `measured`, on two ranks; `bytes_of_units`: of all elements of each unit.
SentByOperation sent_in_step(const Case& run, int measured, std::vector<int64_t>& bytes_of_units) {
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
  std::vector<int64_t> units;  // the last one first: head, layers, table
  Case run{.strategy = ShardingStrategy::optim_grads_params};
  // The head stays for its backward, and the table is not read in backward.
  SentByOperation sent = sent_in_step(run, 3, units);
  ASSERT_EQ(units.size(), 5U);
  const int64_t layers = units[1] + units[2] + units[3];
  EXPECT_EQ(sent["all_gather"].calls, 5 + 3);
  EXPECT_EQ(sent["all_gather"].bytes, (sum(units) + layers) / 2);
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);
  EXPECT_EQ(sent["reduce_scatter"].bytes, sum(units));

  // With the gathers ahead the layer below the head stays too.
  run.ahead = true;
  sent = sent_in_step(run, 3, units);
  EXPECT_EQ(sent["all_gather"].calls, 5 + 2);
  EXPECT_EQ(sent["all_gather"].bytes, (sum(units) + units[2] + units[3]) / 2);
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);

  // Of three micro-batches the second and the third find the first layer, which the backward
  // before used last, and with it the table, gathered ahead.
  run.microbatches = 3;
  sent = sent_in_step(run, 3, units);
  EXPECT_EQ(sent["all_gather"].calls, (5 + 2) + 2 * (4 + 2));
  EXPECT_EQ(sent["reduce_scatter"].calls, 5);

  // A table that is the head too stays from its last use in forward to its first in backward.
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
  for (const auto& [operation, sent] : expected) {
    EXPECT_EQ(found.at(operation).calls, sent.calls) << operation;
    EXPECT_EQ(found.at(operation).bytes, sent.bytes) << operation;
  }
}

/// Whether the memory that a parameter's data lie in is there.
bool is_readable(const at::Tensor& tensor) {
  try {
    (void)tensor.const_data_ptr();
    return true;
  } catch (const c10::Error&) {
    return false;
  }
}

TEST(Sharding, ParametersAreThereOnlyWhileTheyAreUsed) {
  run_ranks(2, [](const ParallelState& state) {
    Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    const UnitNet& net = training.net;
    const auto readable = [&] {
      int count = 0;
      for (const at::Tensor& param : net.parameters()) count += is_readable(param) ? 1 : 0;
      return count;
    };
    EXPECT_EQ(readable(), 0);
    training.backwards();
    EXPECT_EQ(readable(), 3);  // the first layer, which backward used last
    EXPECT_TRUE(is_readable(net.layers->list[0]->up));
    training.ddp.unshard();
    EXPECT_EQ(readable(), 11);
    training.ddp.reshard();
    EXPECT_EQ(readable(), 0);
    for (const at::Tensor& param : net.parameters()) EXPECT_FALSE(param.grad().defined());
  });
}

TEST(Sharding, AnOperatorGathersWhatItTakesAlsoOfSeveralUnitsAndThroughViews) {
  run_ranks(3, [](const ParallelState& state) {
    const Case run{.strategy = ShardingStrategy::optim_grads_params};
    const UnitNet plain(run.tied);
    Training training(state, run);
    const UnitNet& net = training.net;
    const at::Tensor flat = at::cat({net.layers->list[0]->up.view(-1), net.head->weight.view(-1)});
    EXPECT_TRUE(at::equal(
        flat, at::cat({plain.layers->list[0]->up.view(-1), plain.head->weight.view(-1)})));
    const at::Tensor view = net.layers->list[2]->down.t();
    EXPECT_TRUE(at::equal(net.table->weight + 0, plain.table->weight));
    EXPECT_FALSE(is_readable(net.layers->list[2]->down));
    EXPECT_TRUE(at::equal(view.clone(), plain.layers->list[2]->down.t()));
    const at::Tensor both = at::stack({net.layers->list[0]->bias, net.layers->list[1]->bias});
    EXPECT_TRUE(
        at::equal(both[1], plain.layers->list[1]->bias));
    EXPECT_TRUE(at::equal(both[0], plain.layers->list[0]->bias));
  });
}

TEST(Sharding, WhatIsChangedInPlaceStays) {
  run_ranks(2, [](const ParallelState& state) {
    Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    const UnitNet plain(/*tied=*/false);
    const at::NoGradGuard no_grad;
    at::Tensor(training.net.head->weight).mul_(2);
    EXPECT_EQ((training.net.table->weight + 0).numel(), 66);
    EXPECT_FALSE(is_readable(training.net.head->weight));
    training.ddp.unshard();
    EXPECT_TRUE(at::equal(training.net.head->weight, plain.head->weight * 2));
    training.net.layers->list[1]->bias.mutable_data_ptr<double>()[3] = 5;  // who holds, may write
    const at::Tensor kept = training.net.layers->list[1]->bias.view(-1);
    training.ddp.reshard();
    EXPECT_EQ(kept.const_data_ptr<double>()[3], 5);
    EXPECT_FALSE(is_readable(training.net.layers->list[1]->bias));
    EXPECT_EQ(training.net.layers->list[1]->bias[3].item<double>(), 5);
    training.optimizer->reload_model_params();
  });
}

TEST(Sharding, OtherThreadsAreToldWhatToDo) {
  run_ranks(2, [](const ParallelState& state) {
    Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    std::string error;
    std::thread([&] {
      try {
        (void)training.net.layers->list[1]->up.sum();
      } catch (const c10::Error& e) {
        error = e.what();
      }
    }).join();
    EXPECT_NE(error.find("'layers.layer1.up' to 'layers.layer1.down'"), std::string::npos) << error;
    EXPECT_NE(error.find("call unshard()"), std::string::npos) << error;
  });
}

TEST(Sharding, ACallThatNeedsWholeGradientsIsRefused) {
  run_ranks(2, [](const ParallelState& state) {
    for (const ShardingStrategy strategy : kLending) {
      Training training(state, {.strategy = strategy});
      EXPECT_TRUE(throws_with<UsageError>([&] { training.ddp.set_force_all_reduce(true); },
                                          "data_parallel_sharding_strategy = no_shard or optim"));
      EXPECT_TRUE(throws_with<UsageError>([&] { training.ddp.offload_grad_buffers(); },
                                          "data_parallel_sharding_strategy = no_shard or optim"));
      EXPECT_TRUE(throws_with<ConfigError>(
          [&] {
            const DistributedDataParallel muon(training.net, state, Case{.strategy = strategy}.ddp(),
                                               false, MatrixLayout::whole);
          },
          "as Muon needs them"));
    }
  });
}

TEST(Sharding, AStepThatIsGivenUpLeavesTheNextOneAsItWas) {
  const Weights expected = train_plainly({});
  run_ranks(2, [&](const ParallelState& state) {
    for (const ShardingStrategy strategy : kLending) {
      Training training(state, {.strategy = strategy, .ahead = true});
      for (int step = 0; step < kSteps; ++step) {
        training.ddp.zero_grad_buffer();
        {
          const auto guard = training.ddp.no_sync();
          if (state.rank() == 0) training.net.loss(5, 3).backward();
          if (state.rank() == 1) training.net.loss(1, 2).backward();
        }
        training.ddp.abandon_step();
        training.step();
      }
      expect_close(training.weights(), expected, 1e-12, to_string(strategy));
    }
  });
}

TEST(Sharding, AnErrorOnOneRankEndsAll) {
  for (const ShardingStrategy strategy : kLending) {
    const auto errors = errors_of_ranks(3, [&](const ParallelState& state) {
      Training training(state, {.strategy = strategy, .ahead = true});
      training.step();
      if (state.rank() == 1) throw UsageError("rank 1 has had enough");
      for (int step = 0; step < kSteps; ++step) training.step();
    });
    EXPECT_EQ(errors[1], "rank 1 has had enough");
    for (const size_t rank : {size_t{0}, size_t{2}})
      EXPECT_NE(errors[rank].find("rank 1 has had enough"), std::string::npos) << errors[rank];
  }
}

TEST(Sharding, ContradictionsNameBothFields) {
  run_ranks(1, [](const ParallelState& state) {
    const UnitNet net(/*tied=*/false);
    DistributedDataParallelConfig config = Case{.strategy = ShardingStrategy::optim_grads}.ddp();
    config.use_distributed_optimizer = false;
    EXPECT_TRUE(throws_with<ConfigError>(
        [&] { const DistributedDataParallel ddp(net, state, config); },
        "ddp.data_parallel_sharding_strategy: found optim_grads, and "
        "ddp.use_distributed_optimizer = false"));
  });
}

}  // namespace
}  // namespace lockstep
