// Unusual parameters: used twice, frozen, or with non-finite gradients. Also the number of buckets.

#include <gtest/gtest.h>

#include <functional>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/small_net.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::errors_of_ranks;
using testing::run_ranks;
using testing::SmallNet;

/// The first and the last operator use the table, as with a tied embedding.
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

TEST(DistributedDataParallel, AParameterThatIsTrainedAfterItWasWrappedFrozenIsNamed) {
  SmallNet net;
  const at::Tensor weight = net.parameters()[2];
  weight.set_requires_grad(false);
  DistributedDataParallel ddp(net, ParallelState::single_process());
  weight.set_requires_grad(true);
  net.loss(SmallNet::samples(0, 2)).backward();
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] { ddp.finish_grad_sync(); },
      "parameter 'weight1' requires a gradient, but was frozen when it was wrapped"));
  weight.set_requires_grad(false);
  ddp.finish_grad_sync();
  EXPECT_EQ(ddp.state_text(), "ready");
}

TEST(DistributedDataParallel, FrozenExpertsStayThoseOfTheirRank) {
  // Experts are replicated over the ranks 0 and 2, and over 1 and 3.
  run_ranks(
      4,
      [](const ParallelState& state) {
        testing::DescribedParams net;
        net.add("trained", {2}).add("dense", {2}).add("expert", {2}, {.is_expert = true});
        for (const char* const name : {"dense", "expert"})
          at::Tensor(net[name]).set_requires_grad(false).fill_(static_cast<double>(state.rank()));
        DistributedDataParallel ddp(net, state);
        EXPECT_TRUE(at::equal(net["dense"], at::zeros({2}, at::kDouble)));
        EXPECT_TRUE(at::equal(net["expert"], at::full({2}, state.rank() % 2, at::kDouble)));
      },
      {.sizes = {.expert = 2}});
}

/// A dense weight, experts of this rank, and registered buffers beside both.
struct WithExperts : torch::nn::Module {
  struct Experts : testing::DescribedParams {
    explicit Experts(int64_t rank) {
      add("weight", {2}, {.is_expert = true});
      ids = register_buffer("ids", at::full({2}, rank, at::kLong));
    }
    at::Tensor ids;
  };
  struct Mixture : torch::nn::Module {
    explicit Mixture(int64_t rank) {
      router = register_parameter("router", at::ones({2}, at::kDouble));
      counts = register_buffer("counts", at::full({2}, rank, at::kLong));
      experts = register_module("experts", std::make_shared<Experts>(rank));
    }
    at::Tensor router, counts;
    std::shared_ptr<Experts> experts;
  };

  explicit WithExperts(int64_t rank)
      : mixture(register_module("mixture", std::make_shared<Mixture>(rank))) {}
  std::shared_ptr<Mixture> mixture;
};

TEST(DistributedDataParallel, BuffersOfExpertsStayThoseOfTheirRank) {
  // Experts are replicated over the ranks 0 and 2, and over 1 and 3.
  run_ranks(4,
            [](const ParallelState& state) {
              WithExperts net(state.rank());
              DistributedDataParallel ddp(net, state);
              EXPECT_TRUE(at::equal(net.mixture->counts, at::zeros({2}, at::kLong)));
              EXPECT_TRUE(
                  at::equal(net.mixture->experts->ids, at::full({2}, state.rank() % 2, at::kLong)));
            },
            {.sizes = {.expert = 2}});
}

TEST(Reducer, FrozenExpertsAndTheirBuffersStayThoseOfTheirRank) {
  run_ranks(
      2,
      [](const ParallelState& state) {
        WithExperts net(state.rank());
        const at::Tensor expert = net.mixture->experts->params()[0].second;
        expert.set_requires_grad(false).fill_(static_cast<double>(state.rank()));
        Reducer reducer(net, state);
        EXPECT_TRUE(at::equal(net.mixture->counts, at::zeros({2}, at::kLong)));
        EXPECT_TRUE(at::equal(net.mixture->experts->ids, at::full({2}, state.rank(), at::kLong)));
        EXPECT_TRUE(at::equal(expert, at::full({2}, state.rank(), at::kDouble)));
      },
      {.sizes = {.expert = 2}});
}

TEST(DistributedDataParallel, BuffersThatDifferBetweenRanksAreNamed) {
  const std::pair<std::function<void(torch::nn::Module&)>, const char*> odd_buffers[] = {
      {[](auto& net) { net.register_buffer("mean", at::zeros({3})); },
       "buffer 'mean' is [2] Float on rank 0 and [3] Float on rank 1"},
      {[](auto& net) { net.register_buffer("mean", at::zeros({2}, at::kDouble)); },
       "buffer 'mean' is [2] Float on rank 0 and [2] Double on rank 1"},
      {[](auto& net) { net.register_buffer("median", at::zeros({2})); },
       "buffer 0 is 'mean' on rank 0 and 'median' on rank 1"},
      {[](auto&) {}, "rank 0 has 1 buffers and rank 1 has 0; 'mean' is on rank 0 only"}};
  for (const auto& [add, text] : odd_buffers)
    for (const bool reducer : {false, true}) {
      const auto errors = errors_of_ranks(2, [reducer, &odd = add](const ParallelState& state) {
        SmallNet net;
        if (state.rank() == 1)
          odd(net);
        else
          net.register_buffer("mean", at::zeros({2}));
        if (reducer)
          Reducer(net, state);
        else
          DistributedDataParallel(net, state);
      });
      for (const std::string& error : errors)
        EXPECT_NE(error.find(std::string("have different buffers: ") + text), std::string::npos)
            << error;
    }
}

TEST(DistributedDataParallel, ABufferThatSharesMemoryWithATrainedParameterIsNamed) {
  const ParallelState state = ParallelState::single_process();
  SmallNet net;
  const at::Tensor weight = net.parameters()[2];
  net.register_buffer("tied", weight.detach().t());
  EXPECT_TRUE(testing::throws_with<UsageError>(
      [&] { DistributedDataParallel(net, state); },
      "buffer 'tied' and parameter 'weight1' share memory, allowed: one tensor for both"));
  weight.set_requires_grad(false);  // then it stays where it is
  EXPECT_NO_THROW(DistributedDataParallel(net, state));
  SmallNet one_tensor;
  one_tensor.register_buffer("same", one_tensor.parameters()[2]);
  const DistributedDataParallel ddp(one_tensor, state);
  EXPECT_EQ(one_tensor.buffers()[0].data_ptr(), one_tensor.parameters()[2].data_ptr());
}

TEST(DistributedDataParallel, AGradientThatIsNotFiniteIsNamedBeforeItSpreads) {
  for (const bool overlap : {true, false}) {
    const auto errors = testing::errors_of_open_ranks(3, [&](const ParallelState& state) {
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

/// One parameter whose gradient is `value` everywhere on this rank. The gradient is reduced.
struct Filled {
  Filled(const ParallelState& state, double value, bool is_expert,
         const DistributedDataParallelConfig& config) {
    NamedParameter param{"weight", at::zeros({10, 10}, at::kDouble).requires_grad_(true), {}};
    param.description.is_expert = is_expert;
    ddp = std::make_unique<DistributedDataParallel>(std::vector{param}, state, config);
    (param.tensor.sum() * value).backward();
    ddp->finish_grad_sync();
  }
  /// The elements of the parameter that this rank owns, or those that it does not own.
  at::Tensor elements(bool owned) const {
    const ParamAndGradBuffer& buffer = *ddp->buffers()[0];
    at::Tensor mask = at::zeros({buffer.layout().numel}, at::kBool);
    for (const ElementRange& range : buffer.owned()) mask.slice(0, range.start, range.end).fill_(1);
    const at::Tensor in_param = mask.slice(0, 0, 100);
    return buffer.grad_data().slice(0, 0, 100).masked_select(owned ? in_param : ~in_param);
  }
  std::unique_ptr<DistributedDataParallel> ddp;
};

DistributedDataParallelConfig averaging(bool in_collective, bool distributed) {
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  config.average_in_collective = in_collective;
  config.use_distributed_optimizer = distributed;
  return config;
}

TEST(DistributedDataParallel, G62GradientsOfOneAverageToOneWhereTheyAreOwned) {
  for (const int64_t instances : {1, 2})
    for (const bool in_collective : {false, true})
      for (const bool distributed : {false, true}) {
        testing::RankThreadOptions options;
        options.sizes.optimizer_instances = instances;
        run_ranks(
            4,
            [&](const ParallelState& state) {
              const Filled filled(state, 1, false, averaging(in_collective, distributed));
              EXPECT_TRUE(filled.elements(true).eq(1).all().item<bool>());
              // Elements that are not owned hold this rank's own term. Megatron scales it in memory
              // before the collective (1/dp); ours is scaled on the way. With several instances it
              // may be a part of another rank's sum of them.
              if (instances == 1) {
                EXPECT_TRUE(filled.elements(false).eq(1).all().item<bool>());
              }
              EXPECT_EQ(filled.elements(false).numel() > 0, distributed);
            },
            options);
      }
}

TEST(DistributedDataParallel, G64ExpertGradientsAreSummedOverTheirOwnGrid) {
  // The terms are powers of two, so a sum tells which ranks were added.
  const auto sum_of = [](int64_t tensor, int64_t expert_tensor, int64_t rank) {
    double sum = 0;
    testing::RankThreadOptions options;
    options.sizes.tensor = tensor;
    options.sizes.expert_tensor = expert_tensor;
    run_ranks(
        4,
        [&](const ParallelState& state) {
          const Filled filled(state, static_cast<double>(1 << state.rank()), true, {});
          if (state.rank() == rank) sum = filled.elements(true)[0].item<double>();
        },
        options);
    return sum;
  };
  EXPECT_EQ(sum_of(2, 1, 0), 15);
  EXPECT_EQ(sum_of(1, 2, 0), 5);
  EXPECT_EQ(sum_of(1, 2, 3), 10);
}

TEST(DistributedDataParallel, G65ExpertsSeeTheTokensOfAllRanksThatSendToThem) {
  for (const bool in_collective : {false, true})
    for (const bool distributed : {false, true})
      for (const int64_t expert : {1, 2, 4}) {
        testing::RankThreadOptions options;
        options.sizes.expert = expert;
        run_ranks(
            4,
            [&](const ParallelState& state) {
              const Filled filled(state, static_cast<double>(expert), true,
                                  averaging(in_collective, distributed));
              EXPECT_TRUE(filled.elements(true).eq(1).all().item<bool>());
            },
            options);
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

TEST(ParameterCheck, NamesMayHaveLinesAndTabsInThem) {
  run_ranks(2, [](const ParallelState& state) {
    std::vector<NamedText> facts = {{"x\ty", "first"}, {"x\tz", "second"}, {"u\nv", "third"}};
    if (state.rank() == 1) facts.erase(facts.begin());
    EXPECT_NO_THROW(check_same_by_name(facts, state.world()));
  });
  const auto errors = errors_of_ranks(2, [](const ParallelState& state) {
    testing::DescribedParams net;
    net.add("we\nig\tht", {3 + state.rank()}).add("other", {2});
    const DistributedDataParallel ddp(net, state);
  });
  for (const std::string& error : errors)
    EXPECT_NE(error.find("different parameters: parameter 'we\nig\tht' is [3] Double, trained"),
              std::string::npos)
        << error;
}

}  // namespace
}  // namespace lockstep
