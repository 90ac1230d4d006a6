// Gradients, and parameters too, that are sharded over the data-parallel ranks
// (ddp.data_parallel_sharding_strategy): what is in memory, what may be read, what is refused.

#include <gtest/gtest.h>

#include <future>
#include <thread>

#include "lockstep/core/error.h"
#include "lockstep/distributed/block_pool.h"
#include "lockstep/tests/optimizer/sharded_run.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/host_transport.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::errors_of_ranks;
using testing::expect_close;
using testing::is_readable;
using testing::kLending;
using testing::kSteps;
using testing::run_ranks;
using testing::ShardedRun;
using testing::throws_with;
using testing::train;
using testing::Training;
using testing::UnitNet;

TEST(ShardedMemory, ParametersAreThereOnlyWhileTheyAreUsed) {
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
    training.ddp.finish_grad_sync();
    for (const at::Tensor& param : net.parameters()) EXPECT_FALSE(param.grad().defined());
  });
}

TEST(ShardedMemory, AnOperatorGathersWhatItTakesAlsoOfSeveralUnitsAndThroughViews) {
  run_ranks(3, [](const ParallelState& state) {
    const ShardedRun run{.strategy = ShardingStrategy::optim_grads_params};
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
    EXPECT_TRUE(at::equal(both[1], plain.layers->list[1]->bias));
    EXPECT_TRUE(at::equal(both[0], plain.layers->list[0]->bias));
  });
}

TEST(ShardedMemory, WhatIsChangedInPlaceStays) {
  run_ranks(2, [](const ParallelState& state) {
    Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    const UnitNet plain(/*tied=*/false);
    const at::NoGradGuard no_grad;
    at::Tensor(training.net.head->weight).mul_(2);
    EXPECT_EQ((training.net.table->weight + 0).numel(), 66);
    EXPECT_FALSE(is_readable(training.net.head->weight));
    training.ddp.unshard();
    EXPECT_TRUE(at::equal(training.net.head->weight, plain.head->weight * 2));
    training.net.layers->list[1]->bias.mutable_data_ptr<double>()[3] = 5;  // allowed if unsharded
    const at::Tensor kept = training.net.layers->list[1]->bias.view(-1);
    training.ddp.reshard();
    EXPECT_EQ(kept.const_data_ptr<double>()[3], 5);
    EXPECT_FALSE(is_readable(training.net.layers->list[1]->bias));
    EXPECT_EQ(training.net.layers->list[1]->bias[3].item<double>(), 5);
    training.optimizer->reload_model_params();
  });
}

TEST(ShardedMemory, OtherThreadsAreToldWhatToDo) {
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
    EXPECT_NE(error.find("'layers.1.up' to 'layers.1.down'"), std::string::npos) << error;
    EXPECT_NE(error.find("call unshard()"), std::string::npos) << error;
  });
}

TEST(ShardedMemory, EachStepMayRunOnAThreadOfItsOwnAlsoIfItHasTheIdOfAnEndedOne) {
  run_ranks(2, [](const ParallelState& state) {
    const ShardedRun run{.strategy = ShardingStrategy::optim_grads_params};
    const testing::Weights expected = train(state, run);
    Training training(state, run);
    for (int step = 0; step < kSteps; ++step)
      if (state.rank() == 0)
        std::async(std::launch::async, [&] { training.step(); }).get();
      else
        training.step();
    expect_close(training.weights(), expected, 1e-12, "a thread for each step");
  });
}

TEST(ShardedMemory, AParameterWithoutElementsKeepsNoMemoryOfItsUnit) {
  run_ranks(2, [](const ParallelState& state) {
    DescribedParams net;
    net.add("weight", {150}).add("none", {0, 3});
    const ShardedRun run{.strategy = ShardingStrategy::optim_grads_params};
    DistributedDataParallel ddp(net, state, run.ddp());
    const ParamAndGradBuffer& buffer = *ddp.buffers().front();
    const ParamLayout::Slot& slot = buffer.layout().slots[0];
    const ElementRange own = buffer.owned().front();
    const int64_t numel = std::min(own.end, slot.end) - std::max(own.start, slot.start);
    EXPECT_FALSE(is_readable(net["weight"]));
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad_buffer();
      EXPECT_EQ(net["none"].storage().nbytes(), 0U);
      EXPECT_TRUE(is_readable(net["none"]));
      net.backward([](auto&&, auto&&) { return 3; });
      EXPECT_EQ(net["none"].sizes(), (std::vector<int64_t>{0, 3}));
      finalize_model_grads({&ddp}, testing::no_tokens());
      EXPECT_EQ(buffer.held_grads(own).sum().item<double>(), static_cast<double>(6 * numel));
    }
  });
}

TEST(ShardedMemory, WhatWasNotGatheredBeforeTheWrapperIsDestroyedSaysSo) {
  run_ranks(2, [](const ParallelState& state) {
    const UnitNet plain(/*tied=*/false);
    const auto head_after = [&](ShardingStrategy strategy, auto change) {
      const UnitNet net(/*tied=*/false);
      {
        DistributedDataParallel ddp(net, state, ShardedRun{.strategy = strategy}.ddp());
        change(ddp);
      }
      return net.head->weight;
    };
    using Ddp = DistributedDataParallel;
    EXPECT_TRUE(
        at::equal(head_after(ShardingStrategy::optim_grads_params, [](Ddp& ddp) { ddp.unshard(); }),
                  plain.head->weight));
    for (const at::Tensor& lost :
         {head_after(ShardingStrategy::optim_grads_params, [](Ddp&) {}),
          head_after(ShardingStrategy::optim, [](Ddp& ddp) { ddp.note_params_changed(); })})
      EXPECT_TRUE(throws_with<c10::Error>(
          [&] { (void)lost.sum(); }, "had not gathered when it was destroyed: call unshard()"));
  });
}

TEST(ShardedMemory, ACallThatNeedsWholeGradientsIsRefused) {
  run_ranks(2, [](const ParallelState& state) {
    for (const ShardingStrategy strategy : kLending) {
      Training training(state, {.strategy = strategy});
      EXPECT_TRUE(throws_with<UsageError>([&] { training.ddp.set_force_all_reduce(true); },
                                          "data_parallel_sharding_strategy = no_shard or optim"));
      EXPECT_TRUE(throws_with<UsageError>([&] { training.ddp.offload_grad_buffers(); },
                                          "data_parallel_sharding_strategy = no_shard or optim"));
      EXPECT_TRUE(throws_with<ConfigError>(
          [&] {
            const DistributedDataParallel muon(training.net, state,
                                               ShardedRun{.strategy = strategy}.ddp(), false,
                                               MatrixLayout::whole);
          },
          "which Muon needs"));
    }
  });
}

TEST(ShardedMemory, AStepThatIsGivenUpLeavesTheNextOneAsItWas) {
  run_ranks(2, [&](const ParallelState& state) {
    const testing::Weights expected = train(state, {});
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

TEST(ShardedMemory, AnErrorOnOneRankEndsAll) {
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

TEST(ShardedMemory, RanksThatReadInAnotherOrderAreTold) {
  LOCKSTEP_NEEDS_HOST_TRANSPORT();
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    const Training training(state, {.strategy = ShardingStrategy::optim_grads_params});
    const auto& layers = training.net.layers->list;
    const auto first = static_cast<size_t>(state.rank());
    (void)layers[first]->up.sum();
    (void)layers[1 - first]->up.sum();
  });
  for (const std::string& error : errors) {
    EXPECT_NE(error.find("'layers.0.up' to 'layers.0.down'"), std::string::npos) << error;
    EXPECT_NE(error.find("'layers.1.up' to 'layers.1.down'"), std::string::npos) << error;
  }
}

TEST(ShardedMemory, ContradictionsNameBothFields) {
  run_ranks(1, [](const ParallelState& state) {
    const UnitNet net(/*tied=*/false);
    DistributedDataParallelConfig config =
        ShardedRun{.strategy = ShardingStrategy::optim_grads}.ddp();
    config.use_distributed_optimizer = false;
    EXPECT_TRUE(
        throws_with<ConfigError>([&] { const DistributedDataParallel ddp(net, state, config); },
                                 "ddp.data_parallel_sharding_strategy: found optim_grads, and "
                                 "ddp.use_distributed_optimizer = false"));
  });
}
TEST(ShardedMemory, ARankKeepsEighteenBytesOfAParameterOverTheRanks) {
  for (const int64_t ranks : {2, 3, 4})
    run_ranks(ranks, [&](const ParallelState& state) {
      Training training(state, {.strategy = ShardingStrategy::optim_grads_params}, at::kBFloat16);
      training.step();
      int64_t numel = 0, bytes = training.optimizer->state_bytes();
      for (const ParamAndGradBuffer* buffer : training.ddp.buffers()) {
        numel += buffer->layout().numel;
        bytes += buffer->kept_param_bytes() + buffer->kept_grad_bytes();
      }
      EXPECT_EQ(bytes * ranks, 18 * numel);
    });
}

TEST(ShardedMemory, TwoUnitsOfParametersAndTwoOfGradientsAreThereAtOnce) {
  for (const bool ahead : {false, true})
    run_ranks(2, [&](const ParallelState& state) {
      Training training(state, {.strategy = ShardingStrategy::optim_grads_params, .ahead = ahead});
      for (int step = 0; step < 3; ++step) training.step();
      size_t largest = 0;
      for (const ParamAndGradBuffer* buffer : training.ddp.buffers())
        largest = std::max(largest, static_cast<size_t>(buffer->layout().numel) * 8);
      const BlockPool& pool = *training.ddp.buffers().front()->pool();
      EXPECT_LE(pool.peak_bytes(), 4 * largest);
      (void)training.weights();  // all of them
      training.step();
      EXPECT_LE(pool.bytes(), 4 * largest);
    });
}

}  // namespace
}  // namespace lockstep
