#include <gtest/gtest.h>

#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::run_ranks;
using testing::SmallNet;
using testing::throws_with;

DistributedDataParallelConfig sharded() {
  DistributedDataParallelConfig config;
  config.use_distributed_optimizer = true;
  config.bucket_size = 40;
  return config;
}

std::vector<std::string> operations_since(const CollectiveLog& log, int64_t rank, size_t before) {
  std::vector<std::string> operations;
  const auto calls = log.of_rank(rank);
  for (size_t i = before; i < calls.size(); ++i) operations.push_back(calls[i].operation);
  return operations;
}

TEST(ForceAllReduce, G73EveryRankGetsAllGradientsEvenWithTheDistributedOptimizer) {
  SmallNet reference;
  (reference.loss(SmallNet::samples(0, 12)) / 12).backward();
  for (const int64_t instances : {1, 2}) {
    CollectiveLog log;
    testing::RankThreadOptions threads;
    threads.sizes.optimizer_instances = instances;
    threads.log = &log;
    run_ranks(
        4,
        [&](const ParallelState& state) {
          SmallNet net;
          DistributedDataParallel ddp(net, state, sharded());
          const auto step = [&] {
            ddp.zero_grad_buffer();
            net.loss(SmallNet::samples(state.rank() * 3, 3)).backward();
            return finalize_model_grads({&ddp}, at::full({}, 3));
          };
          const auto same = [&](const SmallNet& other) {
            bool all = true;
            for (size_t i = 0; i < net.parameters().size(); ++i)
              all = all &&
                    at::allclose(net.parameters()[i].grad(), other.parameters()[i].grad(), 1e-12);
            return all;
          };
          ddp.set_force_all_reduce(true);
          const size_t before = log.of_rank(state.rank()).size();
          const FinalizeReport report = step();
          EXPECT_TRUE(same(reference));
          for (const std::string& operation : operations_since(log, state.rank(), before))
            EXPECT_EQ(operation, "all_reduce (sum)");
          int64_t bytes = 0;
          for (const auto& entry : report.entries) {
            EXPECT_EQ(entry.operation, kAllReduceSum) << to_string(entry);
            EXPECT_EQ(to_string(entry.operation), "all-reduce sum");
            if (entry.pass == "data-parallel") bytes += entry.bytes;
          }
          EXPECT_EQ(bytes, static_cast<int64_t>(ddp.buffers()[0]->grad_data().nbytes()) *
                               (instances > 1 ? 2 : 1));

          ddp.set_force_all_reduce(false);
          const size_t then = log.of_rank(state.rank()).size();
          step();
          EXPECT_FALSE(same(reference));
          EXPECT_EQ(operations_since(log, state.rank(), then).front(), "reduce_scatter (sum)");
        },
        threads);
  }
}

TEST(Averages, RanksOfContextParallelismCountToo) {
  SmallNet reference;
  (reference.loss(SmallNet::samples(0, 12)) / 4).backward();
  for (const bool in_collective : {false, true}) {
    testing::RankThreadOptions threads;
    threads.sizes.context = 2;
    run_ranks(
        4,
        [&](const ParallelState& state) {
          SmallNet net;
          DistributedDataParallelConfig config;
          config.calculate_per_token_loss = false;
          config.average_in_collective = in_collective;
          DistributedDataParallel ddp(net, state, config);
          net.loss(SmallNet::samples(state.rank() * 3, 3)).backward();
          finalize_model_grads({&ddp});
          for (size_t i = 0; i < net.parameters().size(); ++i)
            EXPECT_TRUE(at::allclose(net.parameters()[i].grad(), reference.parameters()[i].grad(),
                                     1e-12, 1e-14));
        },
        threads);
  }
}

TEST(ForceAllReduce, IsRefusedInsideAStep) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process(), sharded());
  const auto guard = ddp.no_sync();
  net.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_TRUE(throws_with<UsageError>([&] { ddp.set_force_all_reduce(true); }, "accumulating"));
}

TEST(Fp32Accumulation, Bf16TermsAreExchangedAndAddedInFp32) {
  // 256 and three terms of 1, which bf16 would lose one by one: in bf16, 256 + 1 = 256.
  CollectiveLog log;
  testing::RankThreadOptions threads;
  threads.log = &log;
  run_ranks(
      4,
      [&](const ParallelState& state) {
        DistributedDataParallelConfig config = sharded();
        config.grad_reduce_in_fp32 = false;
        config.reduce_scatter_with_fp32_accumulation = true;
        config.calculate_per_token_loss = false;
        for (const bool overlap : {true, false}) {
          config.overlap_grad_reduce = overlap;
          DescribedParams own;
          own.add("weight", {300}, {}, at::kBFloat16);
          DistributedDataParallel ddp(own, state, config);
          const size_t before = log.of_rank(state.rank()).size();
          own.backward([&](auto&&, auto&&) { return state.rank() == 0 ? 256.0 : 1.0; });
          finalize_model_grads({&ddp});
          const ParamAndGradBuffer& buffer = *ddp.buffers()[0];
          EXPECT_EQ(buffer.grad_data().scalar_type(), at::kBFloat16);
          const ElementRange mine = buffer.owned()[0];
          const int64_t end = std::min<int64_t>(mine.end, 300);
          if (mine.start < end) {
            const at::Tensor grads = buffer.grad_data().slice(0, mine.start, end);
            // (256 + 3) / 4 = 64.75, which bf16 rounds to 65; 256 / 4 would be 64.
            EXPECT_TRUE(at::equal(grads, at::full_like(grads, 65)));
          }
          const auto calls = log.of_rank(state.rank());
          ASSERT_EQ(calls.size(), before + 1);
          EXPECT_EQ(calls[before].operation, "all_to_all");
          EXPECT_EQ(calls[before].bytes, buffer.layout().numel * 2);
        }
      },
      threads);
}

TEST(Fp32Accumulation, IsRefusedWithoutTheDistributedOptimizerAndWithAverages) {
  SmallNet net;
  DistributedDataParallelConfig config;
  config.reduce_scatter_with_fp32_accumulation = true;
  const auto wrap = [&] {
    DistributedDataParallel ddp(net, ParallelState::single_process(), config);
  };
  EXPECT_TRUE(throws_with<ConfigError>(wrap, "ddp.reduce_scatter_with_fp32_accumulation"));
  config = sharded();
  config.reduce_scatter_with_fp32_accumulation = config.average_in_collective = true;
  EXPECT_TRUE(throws_with<ConfigError>(wrap, "ddp.average_in_collective = false"));
}

TEST(LargeGradients, NameParameterElementAndField) {
  DescribedParams module;
  module.add("small", {3}).add("large", {4});
  DistributedDataParallelConfig config;
  config.check_for_large_grads = true;
  config.large_grad_threshold = 100.5;
  DistributedDataParallel ddp(module, ParallelState::single_process(), config);
  const auto backward = [&] {
    module.backward([](const std::string& name, auto&&) {
      return name == "small" ? at::full({3}, -100.0, at::kDouble)
                             : at::tensor({1.0, 2.0, -101.0, 500.0}, at::kDouble);
    });
  };
  EXPECT_TRUE(throws_with<UsageError>(
      backward,
      "the gradient of 'large' on this rank has 2 elements of 4 that are larger than "
      "ddp.large_grad_threshold, the first at 2: -101 (ddp.check_for_large_grads)"));
}

TEST(LargeGradients, AreFoundBesideNaNWhichIsNotRefusedForItself) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  for (const double last : {500.0, 2.0}) {
    DescribedParams module;
    module.add("large", {4}).add("nan", {3});
    DistributedDataParallelConfig config;
    config.check_for_large_grads = true;
    config.large_grad_threshold = 100.5;
    DistributedDataParallel ddp(module, ParallelState::single_process(), config);
    const auto backward = [&] {
      module.backward([&](const std::string& name, auto&&) {
        return name == "nan" ? at::full({3}, kNaN, at::kDouble)
                             : at::tensor({kNaN, 1.0, last, -100.0}, at::kDouble);
      });
    };
    if (last > 100.5) {
      EXPECT_TRUE(throws_with<UsageError>(
          backward,
          "the gradient of 'large' on this rank has 1 elements of 4 that are larger than "
          "ddp.large_grad_threshold, the first at 2: 500 (ddp.check_for_large_grads)"));
      continue;
    }
    backward();
    ddp.finish_grad_sync();
    EXPECT_TRUE(module.grad("nan").isnan().all().item<bool>());
    EXPECT_EQ(module.grad("large")[2].item<double>(), 2);
  }
}

TEST(OffloadedGradients, ComeBackAsTheyWereAndThrowInBetween) {
  run_ranks(2, [](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallel ddp(net, state, sharded());
    net.loss(SmallNet::samples(state.rank() * 3, 3)).backward();
    finalize_model_grads({&ddp}, at::full({}, 3));
    const at::Tensor before = ddp.buffers()[0]->grad_data().clone();
    ddp.offload_grad_buffers();
    ddp.offload_grad_buffers();
    EXPECT_TRUE(throws_with<c10::Error>([&] { net.parameters()[0].grad().sum(); },
                                        "off-loaded to the host"));
    EXPECT_TRUE(throws_with<UsageError>([&] { ddp.zero_grad_buffer(); }, "off-loaded"));
    ddp.restore_grad_buffers();
    ddp.restore_grad_buffers();
    EXPECT_TRUE(at::equal(ddp.buffers()[0]->grad_data(), before));
    ddp.zero_grad_buffer();
    net.loss(SmallNet::samples(state.rank() * 3, 3)).backward();
    finalize_model_grads({&ddp}, at::full({}, 3));
    EXPECT_TRUE(at::equal(ddp.buffers()[0]->grad_data(), before));
  });
}

TEST(OffloadedGradients, AreNeitherReducedNorTakenForZeroed) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  {
    const auto guard = ddp.no_sync();
    net.loss(SmallNet::samples(0, 3)).backward();
  }
  ddp.offload_grad_buffers();
  for (const auto& call : std::vector<std::function<void()>>{
           [&] { ddp.start_grad_sync(); }, [&] { ddp.finish_grad_sync(); },
           [&] { finalize_model_grads({&ddp}, at::full({}, 3)); }, [&] { ddp.zero_grad_buffer(); },
           [&] { ddp.abandon_step(); }}) {
    EXPECT_TRUE(throws_with<UsageError>(call, "off-loaded; call restore_grad_buffers() first"));
    EXPECT_EQ(ddp.state_text(), "accumulating 1");
  }
  ddp.restore_grad_buffers();
  ddp.start_grad_sync();
  finalize_model_grads({&ddp}, at::full({}, 3));
  EXPECT_EQ(ddp.state_text(), "ready");
}

TEST(GradientStates, OtherThanSumsOverDataParallelRanksAreRefusedByName) {
  run_ranks(2, [](const ParallelState& state) {
    for (const GradientState declared : {GradientState::complete, GradientState::partial_mean}) {
      DescribedParams module;
      ParamDescription description;
      description.gradient_states[MeshAxis::dp] = declared;
      module.add("first", {2}).add("declared", {2}, description);
      EXPECT_TRUE(
          throws_with<UsageError>([&] { DistributedDataParallel ddp(module, state); },
                                  std::string("parameter 'declared': its gradient is declared ") +
                                      to_string(declared) + " over dp, which has 2 ranks"));
    }
  });
  DescribedParams alone;
  ParamDescription description;
  description.gradient_states[MeshAxis::dp] = GradientState::complete;
  alone.add("declared", {2}, description);
  const DistributedDataParallel ddp(alone, ParallelState::single_process());
}

TEST(WholeMatrices, LieInABufferOfTheirOwnAndUncut) {
  run_ranks(3, [](const ParallelState& state) {
    const SmallNet net(5);
    const auto params = testing::with_matrices(
        net, [](const NamedParameter& p) { return p.name != "weight0" && p.tensor.dim() == 2; });
    DistributedDataParallel ddp(params, state, sharded(), /*disable_bucketing=*/false,
                                MatrixLayout::whole);
    ASSERT_EQ(ddp.buffers().size(), 2u);
    for (const auto& buffer : ddp.buffers()) {
      const bool whole = buffer->holds_whole_matrices();
      EXPECT_EQ(buffer->params().size(), whole ? 4u : 6u);
      if (!whole) continue;
      for (size_t i = 0; i < buffer->params().size(); ++i) {
        const auto& slot = buffer->layout().slots[i];
        for (const ElementRange& owned : buffer->owned())
          EXPECT_TRUE(slot.end <= owned.start || slot.start >= owned.end ||
                      (owned.start <= slot.start && slot.end <= owned.end));
      }
    }
  });
}

}  // namespace
}  // namespace lockstep
