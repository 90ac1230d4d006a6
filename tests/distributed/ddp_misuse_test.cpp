#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/distributed/partly_used.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::errors_of_ranks;
using testing::PartlyUsed;
using testing::run_ranks;
using testing::SmallNet;

TEST(DistributedDataParallel, ASecondBackwardTooManyThrowsByNameOnEveryRank) {
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    SmallNet net;
    DistributedDataParallel ddp(net, state);
    net.loss(SmallNet::samples(0, 2)).backward();
    net.loss(SmallNet::samples(0, 2)).backward();
  });
  for (const std::string& error : errors)
    EXPECT_TRUE(
        error.starts_with("gradient sync: 'bias2' received backward 2 of 1 expected in "
                          "this step (state reducing, bucket 0)"))
        << error;
}

TEST(DistributedDataParallel, GX4AParameterWithoutGradientOnOneRankFailsAllRanksByName) {
  const auto errors = testing::errors_of_open_ranks(3, [](const ParallelState& state) {
    PartlyUsed net;
    DistributedDataParallel ddp(net, state);
    net.loss(state.rank() != 1).backward();
    ddp.finish_grad_sync();
  });
  EXPECT_TRUE(
      errors[1].starts_with("gradient sync: 1 of 2 parameters received no gradient in the "
                            "last micro-batch (state accumulating 1): 'b' (0/1)"))
      << errors[1];
  for (const int rank : {0, 2})
    EXPECT_NE(errors[rank].find("rank 1: gradient sync: 1 of 2 parameters received no gradient"),
              std::string::npos)
        << errors[rank];
}

TEST(DistributedDataParallel, AReplacedGradientIsNamed) {
  using Call = void (*)(DistributedDataParallel&);
  constexpr Call kNothing = [](DistributedDataParallel&) {};
  constexpr Call kFinish = [](DistributedDataParallel& ddp) { ddp.finish_grad_sync(); };
  constexpr Call kFinalize = [](DistributedDataParallel& ddp) {
    finalize_model_grads({&ddp}, at::ones({}));
  };
  constexpr Call kScale = [](DistributedDataParallel& ddp) { ddp.scale_gradients(0.5); };
  constexpr Call kStep = [](DistributedDataParallel& ddp) {
    detail::StepAccess::require_final_gradients(ddp, "step");
  };
  struct Place {
    const char* text;
    Call before, after;
  };
  constexpr Place kPlaces[] = {{"after backward, before finish", kNothing, kFinish},
                               {"after backward, before finalize", kNothing, kFinalize},
                               {"after finish, before finalize", kFinish, kFinalize},
                               {"after finish, before scale", kFinish, kScale},
                               {"after finalize, before scale", kFinalize, kScale},
                               {"after finalize, before the optimizer's step", kFinalize, kStep}};
  for (const ShardingStrategy strategy :
       {ShardingStrategy::no_shard, ShardingStrategy::optim, ShardingStrategy::optim_grads})
    for (const Place& place : kPlaces) {
      const auto errors = errors_of_ranks(2, [&](const ParallelState& state) {
        SmallNet net;
        DistributedDataParallelConfig config;
        config.use_distributed_optimizer = strategy != ShardingStrategy::no_shard;
        config.data_parallel_sharding_strategy = strategy;
        DistributedDataParallel ddp(net, state, config);
        net.loss(SmallNet::samples(0, 2)).backward();
        place.before(ddp);
        const at::Tensor weight = net.parameters()[2];
        weight.mutable_grad() = at::ones_like(weight);  // as an operator out of place does
        place.after(ddp);
      });
      for (const std::string& error : errors)
        EXPECT_NE(error.find("gradient sync: the gradient of 'weight1' no longer lies in its "
                             "buffer"),
                  std::string::npos)
            << to_string(strategy) << ", " << place.text << ": " << error;
    }
}

TEST(DistributedDataParallel, SparseGradientsAreRefusedByName) {
  struct Sparse : torch::nn::Module {
    Sparse() { weight = register_parameter("table", at::ones({4, 2})); }
    at::Tensor weight;
  } net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  net.weight.mutable_grad() = at::Tensor();
  const at::Tensor rows =
      at::embedding(net.weight, at::arange(2), -1, /*scale_grad_by_freq=*/false, /*sparse=*/true);
  try {
    rows.sum().backward();
    FAIL();
  } catch (const UsageError& error) {
    EXPECT_TRUE(std::string(error.what())
                    .starts_with("gradient sync: the gradient of 'table' is "
                                 "sparse"))
        << error.what();
  }
}

TEST(DistributedDataParallel, StepsOutOfOrderAreRefused) {
  SmallNet net;
  DistributedDataParallel ddp(net, ParallelState::single_process());
  EXPECT_EQ(ddp.state_text(), "idle");
  EXPECT_THROW(ddp.finish_grad_sync(), UsageError);
  EXPECT_THROW(ddp.start_grad_sync(), UsageError);
  net.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_EQ(ddp.state_text(), "reducing");
  EXPECT_THROW(ddp.zero_grad_buffer(), UsageError);
  EXPECT_THROW(ddp.scale_gradients(2), UsageError);
  EXPECT_THROW(ddp.set_num_microbatches(2), UsageError);
  ddp.finish_grad_sync();
  EXPECT_EQ(ddp.state_text(), "ready");
  EXPECT_THROW(ddp.finish_grad_sync(), UsageError);
  EXPECT_THROW(net.loss(SmallNet::samples(0, 2)).backward(), UsageError);
}

TEST(DistributedDataParallel, DifferentParametersFailEveryRankWithTheFirstDifference) {
  struct Variant {
    const char* expected;
    std::function<std::vector<NamedParameter>(int64_t rank)> parameters;
  };
  const auto param = [](std::string name, at::Tensor tensor) {
    tensor.set_requires_grad(true);
    return NamedParameter{std::move(name), tensor, default_description(tensor)};
  };
  const Variant variants[] = {
      {"parameter 'w' is [2, 3] Float, trained, dense, partial-sum over cp, partial-sum over dp on "
       "rank 0 and [2, 3] Double, trained, dense, partial-sum over cp, partial-sum over dp on rank "
       "1",
       [&](int64_t rank) {
         return std::vector{param("w", at::ones({2, 3}, rank == 1 ? at::kDouble : at::kFloat))};
       }},
      {"parameter 'w' is [2] Float, trained, ",
       [&](int64_t rank) { return std::vector{param("w", at::ones({rank == 1 ? 3 : 2}))}; }},
      {"parameter 0 is 'w' on rank 0 and 'v' on rank 1",
       [&](int64_t rank) { return std::vector{param(rank == 1 ? "v" : "w", at::ones({2}))}; }},
      {"rank 0 has 1 parameters and rank 1 has 2; 'v' is on rank 1 only",
       [&](int64_t rank) {
         std::vector params{param("w", at::ones({2}))};
         if (rank == 1) params.push_back(param("v", at::ones({2})));
         return params;
       }},
      {"parameter 'w' is [2] Float, trained, dense, partial-sum over cp, partial-sum over dp, no "
       "weight decay on rank 0 and [2] Float, frozen, ",
       [&](int64_t rank) {
         std::vector params{param("w", at::ones({2}))};
         if (rank == 1) params[0].tensor.set_requires_grad(false);
         return params;
       }},
  };
  for (const Variant& variant : variants) {
    const auto errors = errors_of_ranks(3, [&](const ParallelState& state) {
      DistributedDataParallel ddp(variant.parameters(state.rank()), state);
    });
    for (const std::string& error : errors)
      EXPECT_TRUE(error.starts_with(
          std::string("the ranks of group dp-cp [0, 1, 2] have different parameters: ") +
          variant.expected))
          << error;
  }
}

TEST(DistributedDataParallel, DifferentSettingsFailEveryRankByName) {
  using Change = std::function<void(DistributedDataParallelConfig&, bool& disable_bucketing)>;
  MatrixLayout other = MatrixLayout::cut;  // of rank 1
  const std::pair<std::string, Change> changes[] = {
      {"ddp.bucket_size is unset on rank 0 and 2 on rank 1",
       [](auto& config, bool&) { config.bucket_size = 2; }},
      {"ddp.use_distributed_optimizer is false on rank 0 and true on rank 1",
       [](auto& config, bool&) { config.use_distributed_optimizer = true; }},
      {"disable_bucketing is false on rank 0 and true on rank 1",
       [](auto&, bool& disable) { disable = true; }},
      {"matrices is cut on rank 0 and whole on rank 1",
       [&](auto&, bool&) { other = MatrixLayout::whole; }},
  };
  for (const auto& [expected, change] : changes) {
    const auto errors = errors_of_ranks(2, [&](const ParallelState& state) {
      DistributedDataParallelConfig config;
      bool disable_bucketing = false;
      if (state.rank() == 1) change(config, disable_bucketing);
      SmallNet net;
      DistributedDataParallel ddp(net, state, config, disable_bucketing,
                                  state.rank() == 1 ? other : MatrixLayout::cut);
    });
    for (const std::string& error : errors)
      EXPECT_EQ(error, "the ranks of group dp-cp [0, 1] have different settings: " + expected);
  }
}

/// A net of three layers whose backward throws after the last layer.
struct Interrupted : torch::nn::Module {
  Interrupted() {
    for (int i = 0; i < 3; ++i)
      layers.push_back(
          register_parameter("w" + std::to_string(i), at::full({4}, 0.5, at::kDouble)));
  }
  at::Tensor loss(double x, bool interrupted) const {
    at::Tensor value = at::full({4}, x, at::kDouble);
    for (size_t i = 0; i < layers.size(); ++i) {
      value = value * layers[i];
      if (interrupted && i == 1)
        value.register_hook(
            [](const at::Tensor&) { throw std::runtime_error("out of something"); });
    }
    return value.sum();
  }
  std::vector<at::Tensor> layers;
};

TEST(DistributedDataParallel, AStepThatThrewInBackwardCanBeAbandoned) {
  for (const bool distributed : {false, true})
    for (const bool overlap : {false, true})
      run_ranks(2, [&](const ParallelState& state) {
        Interrupted net;
        DistributedDataParallelConfig config;
        config.use_distributed_optimizer = distributed;
        config.overlap_grad_reduce = overlap;
        config.bucket_size = 1;
        DistributedDataParallel ddp(net, state, config);
        const auto step = [&] {
          net.loss(state.rank() + 1, false).backward();
          finalize_model_grads({&ddp}, at::ones({}));
          at::Tensor sum = at::zeros({1}, at::kDouble);  // over all gradients
          for (const ElementRange& owned : ddp.buffers()[0]->owned())
            sum += ddp.buffers()[0]->grad_data().slice(0, owned.start, owned.end).sum();
          if (distributed) all_reduce(state.world(), sum, ReduceOp::sum, "check").wait();
          return sum.item<double>();
        };
        constexpr double kExpected = 12 * (1 + 2) * 0.25 / 2;
        // The ranks stop at different points: one is past its first bucket, the other has not
        // started.
        if (state.rank() == 0) {
          EXPECT_THROW(net.loss(1, true).backward(), std::runtime_error);
        }
        EXPECT_EQ(ddp.state_text(), state.rank() == 1 ? "idle"
                                    : overlap         ? "reducing"
                                                      : "accumulating 1");
        ddp.abandon_step();
        EXPECT_EQ(ddp.state_text(), "idle");
        EXPECT_EQ(step(), kExpected);
        ddp.abandon_step();  // also allowed after a complete step
        EXPECT_EQ(step(), kExpected);
      });
}

TEST(DistributedDataParallel, WhoFinishesAStepThatAnotherRankAbandonedGetsNaN) {
  run_ranks(2, [&](const ParallelState& state) {
    Interrupted net;
    DistributedDataParallelConfig config;
    config.bucket_size = 1;
    DistributedDataParallel ddp(net, state, config);
    if (state.rank() == 0) {
      EXPECT_THROW(net.loss(1, true).backward(), std::runtime_error);
      ddp.abandon_step();
    } else {
      net.loss(2, false).backward();
      ddp.finish_grad_sync();
      EXPECT_TRUE(net.layers[0].grad().isnan().all().item<bool>());
    }
  });
}

TEST(DistributedDataParallel, WrappingTwiceIsRefusedAndChangesNothing) {
  SmallNet net;
  auto ddp = std::make_unique<DistributedDataParallel>(net, ParallelState::single_process());
  const void* const data = net.parameters()[0].data_ptr();
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] { DistributedDataParallel(net, ParallelState::single_process()); },
      "parameter 'weight0' has a post-accumulate-gradient hook already"));
  EXPECT_EQ(net.parameters()[0].data_ptr(), data);
  ddp.reset();
  DistributedDataParallel again(net, ParallelState::single_process());
  net.loss(SmallNet::samples(0, 2)).backward();
  again.finish_grad_sync();
  EXPECT_EQ(again.state_text(), "ready");
}

TEST(DistributedDataParallel, NothingToTrainIsRefused) {
  torch::nn::Module empty;
  EXPECT_THROW(DistributedDataParallel(empty, ParallelState::single_process()), UsageError);
}

TEST(DistributedDataParallel, ContradictingConfigurationIsRefused) {
  SmallNet net;
  DistributedDataParallelConfig config;
  config.average_in_collective = true;
  config.calculate_per_token_loss = true;
  EXPECT_THROW(DistributedDataParallel(net, ParallelState::single_process(), config), ConfigError);
  using Config = DistributedDataParallelConfig;
  const std::pair<const char*, std::function<void(Config&)>> variants[] = {
      {"ddp.bucket_size: found 0, allowed: >= 1", [](Config& c) { c.bucket_size = 0; }},
      {"ddp.num_buckets: found 0, allowed: >= 1", [](Config& c) { c.num_buckets = 0; }},
      {"ddp.bucket_size (4) and ddp.num_buckets (2)",
       [](Config& c) { c.bucket_size = 4, c.num_buckets = 2; }},
      {"ddp.overlap_param_gather: found true", [](Config& c) { c.overlap_param_gather = true; }},
      {"ddp.pad_buckets_for_high_nccl_busbw: found true",
       [](Config& c) { c.pad_buckets_for_high_nccl_busbw = true; }},
      {"ddp.align_param_gather: found true", [](Config& c) { c.align_param_gather = true; }},
      {"ddp.large_grad_threshold: found -1, allowed: > 0",
       [](Config& c) { c.large_grad_threshold = -1; }}};
  for (const auto& [message, set] : variants) {
    config = {};
    set(config);
    EXPECT_TRUE(testing::throws_with<ConfigError>(
        [&] { DistributedDataParallel(net, ParallelState::single_process(), config); }, message));
  }
}

TEST(DistributedDataParallel, AParameterThatIsListedTwiceIsNamed) {
  const at::Tensor weight = at::ones({2}).requires_grad_(true);
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] {
        DistributedDataParallel({{"first", weight, {}}, {"second", weight, {}}},
                                ParallelState::single_process());
      },
      "parameter 'second' is 'first' too; list each tensor once"));
}

TEST(DistributedDataParallel, UnusedParametersCountAsZeroOnRequest) {
  run_ranks(2, [](const ParallelState& state) {
    PartlyUsed net;
    DistributedDataParallelConfig config;
    config.allow_unused_parameters = true;
    config.bucket_size = 1;
    DistributedDataParallel ddp(net, state, config);
    for (int step = 0; step < 2; ++step) {
      ddp.zero_grad_buffer();
      net.loss(state.rank() == 0).backward();
      ddp.finish_grad_sync();
      EXPECT_TRUE(at::equal(net.a.grad(), at::full({2}, 2, at::kDouble)));
      EXPECT_TRUE(at::equal(net.b.grad(), at::full({2}, 1, at::kDouble)));
    }
  });
}

}  // namespace
}  // namespace lockstep
