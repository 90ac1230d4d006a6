#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::run_ranks;
using testing::SmallNet;

constexpr int64_t kSamples = 24;  // of the global batch: divisible by 1, 2, 3, 4 ranks

/// The gradients of the mean over the global batch, without any of our code: plain autograd in one
/// process, in double.
std::vector<at::Tensor> reference_gradients() {
  SmallNet net;
  net.loss(SmallNet::samples(0, kSamples)).backward();
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : net.parameters()) grads.push_back(param.grad() / kSamples);
  return grads;
}

/// Backward over this rank's share of the global batch, in `microbatches` pieces.
void run_backwards(SmallNet& net, DistributedDataParallel& ddp, int64_t microbatches,
                   at::ScalarType dtype, bool use_no_sync) {
  const int64_t share = kSamples / ddp.parallel_state().world_size();
  const int64_t size = share / microbatches;
  for (int64_t i = 0; i < microbatches; ++i) {
    const at::Tensor input =
        SmallNet::samples(ddp.parallel_state().rank() * share + i * size, size, dtype);
    if (use_no_sync && i + 1 < microbatches) {
      const auto guard = ddp.no_sync();
      net.loss(input).backward();
    } else {
      net.loss(input).backward();
    }
  }
}

at::Tensor local_samples(const ParallelState& state) {
  return at::full({}, kSamples / state.world_size(), at::kLong);
}

void expect_close(const SmallNet& net, const std::vector<at::Tensor>& expected, double tolerance,
                  const std::string& what) {
  const auto params = net.parameters();
  for (size_t i = 0; i < params.size(); ++i) {
    const at::Tensor difference = (params[i].grad().to(at::kDouble) - expected[i]).abs();
    EXPECT_LE(difference.max().item<double>(), tolerance * expected[i].abs().max().item<double>())
        << what << ", parameter " << i;
  }
}

/// Settings of the wrapper that must not change the result.
struct Setting {
  int64_t ranks, microbatches;
  bool overlap, counted;
  std::optional<int64_t> bucket_size;
};

std::vector<Setting> settings() {
  std::vector<Setting> all;
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const int64_t microbatches : {1, 2})
      for (const bool overlap : {false, true})
        for (const bool counted : {false, true})
          for (const auto bucket_size :
               {std::optional<int64_t>(1), std::optional<int64_t>(20), std::optional<int64_t>()})
            all.push_back({ranks, microbatches, overlap, counted, bucket_size});
  return all;
}

TEST(DistributedDataParallel, GradientsEqualOneProcessInEverySetting) {
  const auto expected = reference_gradients();
  for (const Setting& s : settings()) {
    run_ranks(s.ranks, [&](const ParallelState& state) {
      SmallNet net;
      DistributedDataParallelConfig config;
      config.overlap_grad_reduce = s.overlap;
      config.bucket_size = s.bucket_size;
      DistributedDataParallel ddp(net, state, config);
      if (s.counted) ddp.set_num_microbatches(s.microbatches);
      for (int step = 0; step < 2; ++step) {
        ddp.zero_grad_buffer();
        run_backwards(net, ddp, s.microbatches, at::kDouble, !s.counted);
        finalize_model_grads({&ddp}, local_samples(state));
        expect_close(net, expected, 1e-14, ddp.describe());
      }
    });
  }
}

TEST(DistributedDataParallel, AveragingModesEqualTheReference) {
  const auto expected = reference_gradients();
  for (const bool in_collective : {false, true}) {
    run_ranks(3, [&](const ParallelState& state) {
      SmallNet net;
      DistributedDataParallelConfig config;
      config.average_in_collective = in_collective;
      config.calculate_per_token_loss = false;
      DistributedDataParallel ddp(net, state, config);
      // Each rank's loss is the mean of its share, so the mean over ranks is the global mean.
      const int64_t share = kSamples / 3;
      (net.loss(SmallNet::samples(state.rank() * share, share)) / share).backward();
      finalize_model_grads({&ddp});
      expect_close(net, expected, 1e-14, ddp.describe());
    });
  }
}

TEST(DistributedDataParallel, Fp32GradientsStayWithinRounding) {
  const auto expected = reference_gradients();
  run_ranks(4, [&](const ParallelState& state) {
    SmallNet net(3, at::kFloat);
    DistributedDataParallel ddp(net, state);
    run_backwards(net, ddp, 2, at::kFloat, true);
    finalize_model_grads({&ddp}, local_samples(state));
    expect_close(net, expected, 1e-6, "fp32");
  });
}

TEST(DistributedDataParallel, Bf16ParametersHaveFp32GradientsThatAccumulateInPlace) {
  run_ranks(2, [&](const ParallelState& state) {
    SmallNet net(2, at::kBFloat16);
    DistributedDataParallel ddp(net, state);
    ASSERT_EQ(ddp.buffers().size(), 1u);
    EXPECT_EQ(ddp.buffers()[0]->grad_data().scalar_type(), at::kFloat);
    std::vector<const void*> addresses;
    for (const at::Tensor& param : net.parameters()) addresses.push_back(param.grad().data_ptr());
    // 300 equal micro-batches: in bf16 the sum would stop growing at 256 times the term.
    for (int i = 0; i < 299; ++i) {
      const auto guard = ddp.no_sync();
      net.loss(SmallNet::samples(0, 1, at::kBFloat16)).backward();
    }
    SmallNet once(2, at::kBFloat16);
    once.loss(SmallNet::samples(0, 1, at::kBFloat16)).backward();
    const auto params = net.parameters(), terms = once.parameters();
    for (size_t i = 0; i < params.size(); ++i) {
      EXPECT_EQ(params[i].grad().data_ptr(), addresses[i]);
      EXPECT_TRUE(at::allclose(params[i].grad(), terms[i].grad().to(at::kFloat) * 299, 1e-5));
    }
    ddp.start_grad_sync();
    ddp.finish_grad_sync();
    for (size_t i = 0; i < params.size(); ++i)
      EXPECT_TRUE(at::allclose(params[i].grad(), terms[i].grad().to(at::kFloat) * 598, 1e-5));
  });
}

TEST(DistributedDataParallel, Bf16GradientsOnRequest) {
  SmallNet net(1, at::kBFloat16);
  DistributedDataParallelConfig config;
  config.grad_reduce_in_fp32 = false;
  DistributedDataParallel ddp(net, ParallelState::single_process(), config);
  EXPECT_EQ(ddp.buffers()[0]->grad_data().scalar_type(), at::kBFloat16);
}

TEST(DistributedDataParallel, OneCollectivePerBucketAndStepAndNoneInsideNoSync) {
  for (const bool overlap : {true, false}) {
    CollectiveLog log;
    run_ranks(2,
              [&](const ParallelState& state) {
                SmallNet net;
                DistributedDataParallelConfig config;
                config.bucket_size = 20;
                config.overlap_grad_reduce = overlap;
                DistributedDataParallel ddp(net, state, config);
                const auto buckets = ddp.buckets();
                ASSERT_GT(buckets.size(), 2u);
                const size_t before = log.of_rank(state.rank()).size();
                {
                  const auto outer = ddp.no_sync();
                  net.loss(SmallNet::samples(0, 2)).backward();
                  {
                    const auto inner = ddp.no_sync();
                    net.loss(SmallNet::samples(2, 2)).backward();
                  }
                  net.loss(SmallNet::samples(4, 2)).backward();  // the outer guard still holds
                }
                EXPECT_EQ(log.of_rank(state.rank()).size(), before);
                net.loss(SmallNet::samples(6, 2)).backward();
                if (overlap) {
                  EXPECT_EQ(log.of_rank(state.rank()).size(), before + buckets.size());
                }
                const FinalizeReport report =
                    finalize_model_grads({&ddp}, at::full({}, 8, at::kLong));

                auto calls = log.of_rank(state.rank());
                calls.erase(calls.begin(), calls.begin() + static_cast<int64_t>(before));
                ASSERT_EQ(calls.size(), buckets.size() + 1);
                for (size_t i = 0; i < calls.size(); ++i) {
                  const bool tokens = i == buckets.size();
                  EXPECT_EQ(calls[i].operation, "all_reduce (sum)");
                  EXPECT_EQ(calls[i].dtype, "Double");
                  EXPECT_EQ(calls[i].bytes, tokens ? 8 : buckets[i].bytes);
                  EXPECT_EQ(report.entries[i].bytes, calls[i].bytes);
                  EXPECT_EQ(report.entries[i].pass, tokens ? "num_tokens" : "data-parallel");
                }
              },
              {.log = &log});
  }
}

TEST(DistributedDataParallel, BucketsAreLaunchedInTheSameOrderOnAllRanks) {
  struct TwoWeights : torch::nn::Module {
    TwoWeights() {
      a = register_parameter("a", at::ones({4}, at::kDouble));
      b = register_parameter("b", at::ones({6}, at::kDouble));
    }
    at::Tensor a, b;
  };
  CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              TwoWeights net;
              DistributedDataParallelConfig config;
              config.bucket_size = 1;
              DistributedDataParallel ddp(net, state, config);
              // The gradient of 'a' arrives first on rank 0 and last on rank 1.
              for (const bool first : {true, false})
                ((state.rank() == 0) == first ? net.a : net.b).sum().backward();
              ddp.finish_grad_sync();
              const auto calls = log.of_rank(state.rank());
              EXPECT_EQ(calls[calls.size() - 2].bytes, 48);  // b, registered last, goes first
              EXPECT_EQ(calls[calls.size() - 1].bytes, 32);
              for (const at::Tensor& param : net.parameters())
                EXPECT_TRUE(at::equal(param.grad(), at::full_like(param, 2)));
            },
            {.log = &log});
}

TEST(DistributedDataParallel, FrozenParametersAreLeftAlone) {
  run_ranks(2, [](const ParallelState& state) {
    SmallNet net;
    net.parameters()[2].set_requires_grad(false);
    DistributedDataParallel ddp(net, state);
    EXPECT_EQ(ddp.buffers()[0]->params().size(), net.parameters().size() - 1);
    net.loss(SmallNet::samples(0, 4)).backward();
    ddp.finish_grad_sync();
    EXPECT_FALSE(net.parameters()[2].grad().defined());
  });
}

TEST(DistributedDataParallel, EachDtypeHasItsBuffer) {
  struct Mixed : torch::nn::Module {
    Mixed() {
      register_parameter("wide", at::ones({3}, at::kDouble));
      register_parameter("narrow", at::ones({5}, at::kFloat));
      register_parameter("wide2", at::ones({2}, at::kDouble));
    }
  } net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  ASSERT_EQ(ddp.buffers().size(), 2u);
  EXPECT_EQ(ddp.buffers()[0]->layout().numel, 5);
  EXPECT_EQ(ddp.buffers()[1]->layout().numel, 5);
  ASSERT_EQ(ddp.buckets().size(), 2u);
  EXPECT_EQ(ddp.buckets()[0].parameters, std::vector<std::string>{"narrow"});  // launched first
}

TEST(DistributedDataParallel, GX2GradientsSetToNoneAreCopiedInAndPutBack) {
  const auto expected = reference_gradients();
  run_ranks(2, [&](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallel ddp(net, state);
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad_buffer();
      for (at::Tensor& param : net.parameters()) param.mutable_grad() = at::Tensor();
      run_backwards(net, ddp, 2, at::kDouble, true);
      finalize_model_grads({&ddp}, local_samples(state));
      expect_close(net, expected, 1e-14, "set to none");
      EXPECT_EQ(net.parameters()[0].grad().data_ptr(), ddp.buffers()[0]->grad_view(0).data_ptr());
    }
  });
}

TEST(DistributedDataParallel, ScaleGradients) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  net.loss(SmallNet::samples(0, 2)).backward();
  ddp.finish_grad_sync();
  const at::Tensor before = net.parameters()[0].grad().clone();
  ddp.scale_gradients(0.25);
  EXPECT_TRUE(at::equal(net.parameters()[0].grad(), before * 0.25));
}

TEST(DistributedDataParallel, ConstructionGivesAllRanksTheParametersOfTheFirst) {
  struct WithBuffer : SmallNet {
    WithBuffer() { statistics = register_buffer("statistics", at::zeros({2, 3}).t()); }
    at::Tensor statistics;
  };
  run_ranks(3, [](const ParallelState& state) {
    WithBuffer net;
    at::NoGradGuard no_grad;
    net.parameters()[4].set_requires_grad(false);
    for (at::Tensor& param : net.parameters()) param.add_(static_cast<double>(state.rank()));
    net.statistics.add_(static_cast<double>(state.rank() + 5));
    DistributedDataParallel ddp(net, state);
    const SmallNet fresh;
    for (size_t i = 0; i < net.parameters().size(); ++i)
      EXPECT_TRUE(at::equal(net.parameters()[i], fresh.parameters()[i])) << i;
    EXPECT_TRUE(at::equal(net.statistics, at::full({3, 2}, 5.0)));
  });
}

TEST(DistributedDataParallel, TheModuleGoesOnWorkingWhenTheWrapperIsGone) {
  SmallNet net;
  { DistributedDataParallel ddp(net, ParallelState::single_process()); }
  for (int i = 0; i < 2; ++i) net.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_TRUE(net.parameters()[0].grad().defined());
}

TEST(DistributedDataParallel, LargeGradientsAreScaledOnceHoweverTheStepEnds) {
  constexpr int64_t kLarge = 1 << 18;
  for (const bool overlap : {true, false})
    for (const bool last_outside_no_sync : {true, false})
      run_ranks(3, [&](const ParallelState& state) {
        std::vector<NamedParameter> params;
        for (const int64_t numel : {int64_t{3}, kLarge, int64_t{5}, kLarge, int64_t{7}})
          params.push_back(
              {"p" + std::to_string(params.size()), at::zeros({numel}).requires_grad_(true), {}});
        DistributedDataParallelConfig config;
        config.calculate_per_token_loss = false;
        config.overlap_grad_reduce = overlap;
        config.bucket_size = kLarge + 1;
        DistributedDataParallel ddp(params, state, config);
        for (int step = 0; step < 2; ++step) {
          ddp.zero_grad_buffer();
          const auto backward = [&] {
            at::Tensor loss = at::zeros({});
            for (const auto& param : params) loss = loss + param.tensor.sum();
            (loss * static_cast<double>(3 * state.rank() + 3)).backward();
          };
          {
            const auto guard = ddp.no_sync();
            backward();
            if (!last_outside_no_sync) backward();
          }
          if (last_outside_no_sync && !overlap) {  // a step that is discarded
            backward();
            ddp.abandon_step();
            const auto guard = ddp.no_sync();
            backward();
          }
          if (last_outside_no_sync) backward();
          if (!last_outside_no_sync) ddp.start_grad_sync();
          ddp.finish_grad_sync();
          for (const auto& param : params)  // 2 * mean of 3, 6, 9
            EXPECT_TRUE(at::equal(param.tensor.grad(), at::full_like(param.tensor, 12)));
        }
      });
}

}  // namespace
}  // namespace lockstep
