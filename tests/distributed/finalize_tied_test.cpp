#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::no_tokens;
using testing::run_ranks;
using testing::throws_with;

const ParamDescription kEmbedding{.tie = Tie{"word_embeddings"}};

/// What a rank sends after the data-parallel pass: "operation group [ranks] bytes".
std::vector<std::string> sent_by(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> sent;
  for (const CollectiveRecord& call : log.of_rank(rank)) {
    if (!call.label.starts_with("gradient tied") && call.label != "num_tokens") continue;
    std::string ranks;
    for (const int64_t member : call.ranks) ranks += " " + std::to_string(member);
    sent.push_back(call.operation + " " + call.group + ranks + ", " + std::to_string(call.bytes));
  }
  return sent;
}

using Sent = std::vector<std::string>;

TEST(TiedGradients, G71BothCopiesGetTheSumAndTheMiddleStagesSendNothing) {
  for (const int64_t stages : {2, 4}) {
    CollectiveLog log;
    run_ranks(stages,
              [&](const ParallelState& state) {
                DescribedParams net;
                const bool first = state.rank() == 0, last = state.rank() == stages - 1;
                if (first) net.add("embedding", {4, 3}, kEmbedding);
                net.add("norm", {3});
                if (last) net.add("output", {4, 3}, kEmbedding);
                DistributedDataParallel ddp(net, state);
                net.backward([&](const std::string& name, const at::Tensor& param) {
                  if (name == "norm") return at::full({3}, 7.0, at::kDouble);
                  return at::arange(12, at::kDouble).view(param.sizes()) * (first ? 1 : 100);
                });
                const FinalizeReport report = finalize_model_grads({&ddp}, no_tokens());
                const at::Tensor sum = at::arange(12, at::kDouble).view({4, 3}) * 101;
                EXPECT_TRUE(!first || at::equal(net.grad("embedding"), sum));
                EXPECT_TRUE(!last || at::equal(net.grad("output"), sum));
                EXPECT_TRUE(at::equal(net.grad("norm"), at::full({3}, 7.0, at::kDouble)));
                const auto tied = std::count_if(report.entries.begin(), report.entries.end(),
                                                [](auto& e) { return e.pass == "tied gradients"; });
                EXPECT_EQ(tied, first || last ? 1 : 0);
              },
              {.sizes = {.pipeline = stages}, .log = &log});
    const std::string pipeline = stages == 2 ? " 0 1" : " 0 1 2 3";
    const std::string last = std::to_string(stages - 1);
    const std::string tokens = "broadcast (from " + last + ") pp" + pipeline + ", 8";
    for (int64_t rank = 0; rank < stages; ++rank) {
      const bool holds = rank == 0 || rank == stages - 1;
      EXPECT_EQ(
          sent_by(log, rank),
          holds ? (Sent{"all_reduce (sum) embedding 0 " + last + ", 96", tokens}) : Sent{tokens});
    }
  }
}

TEST(TiedGradients, ShardsOfAllCopiesLineUpUnderTheDistributedOptimizer) {
  // Two stages of two ranks and two chunks. Each chunk has other parameters before its copy.
  const auto check = [](const ParallelState& state, TiedStages stages, double sum) {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    DescribedParams chunks[2];
    std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
    const int64_t stage = state.rank() / 2, place = state.rank() % 2;
    const bool holds = stages == TiedStages::all || stage == 0;
    for (int64_t i = 0; i < 2; ++i) {
      if (holds) chunks[i].add("copy", {300}, {.tie = Tie{"copies", stages}});
      chunks[i].add("layer", {200 + 700 * i + 450 * stage});
      ddps.push_back(std::make_unique<DistributedDataParallel>(chunks[i], state, config));
      chunks[i].backward([&](auto&, auto&) { return static_cast<double>(10 * state.rank() + i); });
    }
    finalize_model_grads({ddps[0].get(), ddps[1].get()}, no_tokens());
    for (const auto& ddp : ddps) {
      if (!holds) continue;
      const ParamAndGradBuffer& buffer = *ddp->buffers()[0];
      const auto& slot = buffer.layout().slots[0];
      int64_t owned = 0;
      for (const at::Tensor& part : owned_grads(buffer, {slot.start, slot.end})) {
        EXPECT_TRUE(at::equal(part, at::full_like(part, sum))) << to_string(stages);
        owned += part.numel();
      }
      EXPECT_EQ(owned, place == 0 ? 192 : 108);  // of a bucket of 384
    }
  };
  for (const auto& [stages, sum] : {std::pair(TiedStages::all, 124.), {TiedStages::first, 22.}})
    run_ranks(
        4, [&](const ParallelState& state) { check(state, stages, sum); },
        {.sizes = {.pipeline = 2, .virtual_pipeline = 2}, .timeout = std::chrono::seconds(5)});
}

TEST(TiedGradients, EveryShardOfTheEmbeddingMeetsItsTwin) {
  // tp 2, dp 2, pp 2: ranks 0-3 are the first stage. Gradients are 2^rank: a copy on tensor rank t
  // gets the terms of all ranks with that t.
  run_ranks(8,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("weight", {2, 3},
                      {.placements = {{MeshAxis::tp, Shard{0}}}, .tie = Tie{"word_embeddings"}});
              DistributedDataParallel ddp(net, state);
              net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
              finalize_model_grads({&ddp}, no_tokens());
              EXPECT_EQ(net.grad("weight")[1][2].item<double>(), state.rank() % 2 == 0 ? 85 : 170);
            },
            {.sizes = {.tensor = 2, .pipeline = 2}});
}

TEST(TiedGradients, G68AParameterOfAllStagesAndChunksGetsTheSumOfAll) {
  CollectiveLog log;
  run_ranks(
      4,
      [](const ParallelState& state) {
        const ParamDescription everywhere{.tie = Tie{"embedder", TiedStages::all}};
        DescribedParams chunks[2];
        std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
        for (DescribedParams& chunk : chunks) {
          chunk.add("embedder", {3}, everywhere).add("layer", {2});
          ddps.push_back(std::make_unique<DistributedDataParallel>(chunk, state));
        }
        for (int i = 0; i < 2; ++i)
          chunks[i].backward(
              [&](auto&, auto&) { return static_cast<double>(10 * state.rank() + i); });
        finalize_model_grads({ddps[0].get(), ddps[1].get()}, no_tokens());
        for (int i = 0; i < 2; ++i) {
          EXPECT_TRUE(at::equal(chunks[i].grad("embedder"), at::full({3}, 124.0, at::kDouble)));
          EXPECT_EQ(chunks[i].grad("layer")[1].item<double>(), 10. * state.rank() + i);
        }
      },
      {.sizes = {.pipeline = 4, .virtual_pipeline = 2}, .log = &log});
  EXPECT_EQ(sent_by(log, 3),
            (Sent{"all_reduce (sum) pp 0 1 2 3, 24", "broadcast (from 3) pp 0 1 2 3, 8"}));
}

TEST(TiedGradients, CopiesInOneProcessAreSummedWithoutSending) {
  DescribedParams first, second;
  first.add("embedding", {2}, kEmbedding)
      .add("positions", {2}, {.tie = Tie{"positions", TiedStages::first}});
  second.add("output", {2}, kEmbedding);
  const ParallelState state = ParallelState::single_process();
  DistributedDataParallel a(first, state), b(second, state);
  first.backward([](auto&, auto&) { return 3.0; });
  second.backward([](auto&, auto&) { return 4.0; });
  finalize_model_grads({&a, &b}, no_tokens());
  EXPECT_EQ(first.grad("embedding")[0].item<double>(), 7);
  EXPECT_EQ(second.grad("output")[1].item<double>(), 7);
  EXPECT_EQ(first.grad("positions")[1].item<double>(), 3);
}

TEST(TiedGradients, CopiesInOneProcessAreNotFinalBeforeTheyAreSummed) {
  DescribedParams first, second;
  first.add("embedding", {2}, kEmbedding);
  second.add("output", {2}, kEmbedding);
  const ParallelState state = ParallelState::single_process();
  DistributedDataParallelConfig config;
  config.calculate_per_token_loss = false;
  DistributedDataParallel a(first, state, config), b(second, state, config);
  first.backward([](auto&, auto&) { return 3.0; });
  second.backward([](auto&, auto&) { return 4.0; });
  for (DistributedDataParallel* ddp : {&a, &b}) ddp->finish_grad_sync();
  const auto ask = [&] { detail::StepAccess::require_final_gradients(b, "step"); };
  EXPECT_TRUE(throws_with<UsageError>(ask, "call finalize_model_grads()"));
  finalize_model_grads({&a, &b});
  EXPECT_NO_THROW(ask());
  EXPECT_EQ(second.grad("output")[0].item<double>(), 7);
}

TEST(TiedGradients, CopiesThatAreReducedInDifferentWaysAreRefused) {
  run_ranks(2, [](const ParallelState& state) {
    DistributedDataParallelConfig config;
    config.use_distributed_optimizer = true;
    DescribedParams chunks[2];
    std::vector<std::unique_ptr<DistributedDataParallel>> ddps;
    for (DescribedParams& chunk : chunks) {
      chunk.add("embedding", {6}, kEmbedding);
      ddps.push_back(std::make_unique<DistributedDataParallel>(chunk, state, config));
    }
    ddps[0]->set_force_all_reduce(true);
    for (DescribedParams& chunk : chunks) chunk.backward([](auto&, auto&) { return 1.0; });
    for (const size_t first : {0u, 1u})
      EXPECT_TRUE(throws_with<UsageError>(
          [&] {
            finalize_model_grads({ddps[first].get(), ddps[1 - first].get()}, no_tokens());
          },
          "differ in shape, dtype of the gradient, sharding, padding of buckets or "
          "set_force_all_reduce()"));
  });
}

TEST(TiedGradients, SeveralTiesMeetInOneOrderWhateverTheRegistration) {
  run_ranks(
      2,
      [](const ParallelState& state) {
        const ParamDescription a{.tie = Tie{"a"}}, b{.tie = Tie{"b", TiedStages::all}},
            c{.tie = Tie{"c"}};
        DescribedParams net;
        if (state.rank() == 0)
          net.add("a", {2}, a).add("b", {2}, b).add("c", {2}, c);
        else
          net.add("z", {2}, c).add("y", {2}, b).add("x", {2}, a);
        DistributedDataParallel ddp(net, state);
        net.backward([](const std::string& name, auto&) { return static_cast<double>(name[0]); });
        finalize_model_grads({&ddp}, no_tokens());
        const bool first = state.rank() == 0;
        EXPECT_EQ(net.grad(first ? "a" : "x")[0].item<double>(), 'a' + 'x');
        EXPECT_EQ(net.grad(first ? "b" : "y")[0].item<double>(), 'b' + 'y');
        EXPECT_EQ(net.grad(first ? "c" : "z")[0].item<double>(), 'c' + 'z');
      },
      {.sizes = {.pipeline = 2}});
}

TEST(TiedGradients, ShardsOfBothStagesLineUp) {
  // The stages' other parameters differ, so in a shared bucket the embedding would have another
  // place.
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              const bool first = state.rank() < 2;
              DescribedParams net;
              if (first) net.add("layer", {700}).add("embedding", {300}, kEmbedding);
              if (!first) net.add("output", {300}, kEmbedding).add("layer", {50});
              DistributedDataParallelConfig config;
              config.use_distributed_optimizer = true;
              DistributedDataParallel ddp(net, state, config);
              net.backward([&](auto&, const at::Tensor& param) {
                return at::arange(param.numel(), at::kDouble) * (1 << state.rank());
              });
              finalize_model_grads({&ddp}, no_tokens());
              const ParamAndGradBuffer& buffer = *ddp.buffers().front();
              const size_t index = first ? 1 : 0;
              const auto& slot = buffer.layout().slots[index];
              int64_t owned = 0;
              for (const ElementRange& range : buffer.owned())
                for (int64_t i = std::max(range.start, slot.start);
                     i < std::min(range.end, slot.end); ++i, ++owned)
                  EXPECT_EQ(buffer.grad_data()[i].item<double>(), 15. * (i - slot.start));
              EXPECT_EQ(owned, state.rank() % 2 == 0 ? 192 : 108);
            },
            {.sizes = {.pipeline = 2}, .log = &log});
  // 300 elements are padded to 384 = 2 shards of 192; the second shard has 108 of them.
  EXPECT_EQ(sent_by(log, 0).front(), "all_reduce (sum) embedding 0 2, 1536");
  EXPECT_EQ(sent_by(log, 3).front(), "all_reduce (sum) embedding 1 3, 864");
}

TEST(TiedGradients, RefusesAStageThatCannotHoldOneAndCopiesThatDiffer) {
  const auto errors = testing::errors_of_ranks(3,
                                               [](const ParallelState& state) {
                                                 DescribedParams net;
                                                 net.add("weight", {3}, kEmbedding);
                                                 DistributedDataParallel ddp(net, state);
                                                 net.backward([](auto&, auto&) { return 1.0; });
                                                 finalize_model_grads({&ddp}, no_tokens());
                                               },
                                               {.sizes = {.pipeline = 3}});
  EXPECT_EQ(errors[1],
            "finalize_model_grads: parameter 'weight' on rank 1 is tied ('word_embeddings') on the "
            "first and the last stage, but this rank holds another stage");
  EXPECT_NE(errors[0].find("holds another stage"), std::string::npos) << errors[0];

  DescribedParams net;
  net.add("a", {3}, kEmbedding).add("b", {4}, kEmbedding);
  DistributedDataParallel ddp(net, ParallelState::single_process());
  net.backward([](auto&, auto&) { return 1.0; });
  EXPECT_TRUE(throws_with<UsageError>([&] { finalize_model_grads({&ddp}, no_tokens()); },
                                      "'a' [3] and 'b' [4] are tied as 'word_embeddings'"));
}

TEST(TiedGradients, AStageWithoutItsCopyIsAnErrorAndNoHang) {
  // One half of the pair is frozen on the last stage, so it does not take part.
  const auto errors =
      testing::errors_of_ranks(2,
                               [](const ParallelState& state) {
                                 DescribedParams net;
                                 net.add("weight", {3}, kEmbedding).add("norm", {2});
                                 if (state.rank() == 1)
                                   at::Tensor(net["weight"]).set_requires_grad(false);
                                 DistributedDataParallel ddp(net, state);
                                 net.backward([](auto&, auto&) { return 1.0; });
                                 finalize_model_grads({&ddp}, no_tokens());
                               },
                               {.sizes = {.pipeline = 2}, .timeout = std::chrono::seconds(2)});
  EXPECT_NE(errors[0].find("gradient tied as 'word_embeddings'"), std::string::npos) << errors[0];
  EXPECT_FALSE(errors[1].empty());
}

TEST(NumTokens, G70TheLastStageCounts) {
  // pp 2, dp 2: ranks 2 and 3 are the last stage, with 300 and 100 tokens.
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("weight", {2});
              DistributedDataParallel ddp(net, state);
              net.backward([](auto&, auto&) { return 400.0; });
              std::optional<at::Tensor> tokens;
              if (state.rank() >= 2)
                tokens = at::full({}, state.rank() == 2 ? 300 : 100, at::kLong);
              if (state.rank() == 1) tokens = at::full({}, 9999, at::kLong);  // is ignored
              const FinalizeReport report = finalize_model_grads({&ddp}, tokens);
              EXPECT_EQ(net.grad("weight")[1].item<double>(), 2);
              EXPECT_EQ(report.num_tokens.item<double>(), 400);
            },
            {.sizes = {.pipeline = 2}, .log = &log});
  EXPECT_EQ(sent_by(log, 0),
            (Sent{"broadcast (from 1) pp 0 2, 8", "all_reduce (sum) dp-cp 0 1, 8"}));
}

TEST(RouterBiases, G69AnExpertWithTooFewTokensRises) {
  DescribedParams net;
  net.add("weight", {1});
  DistributedDataParallel ddp(net, ParallelState::single_process());
  net.backward([](auto&, auto&) { return 1.0; });
  const at::Tensor bias = at::zeros({2}), tokens = at::tensor({0.f, 2.f});
  finalize_model_grads({&ddp}, no_tokens(), {{bias, tokens, .25}});
  EXPECT_TRUE(at::equal(bias, at::tensor({.25f, -.25f})));
  EXPECT_TRUE(at::equal(tokens, at::zeros({2})));
}

TEST(RouterBiases, TokensOfAllRanksThatShareTheRouterCount) {
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("weight", {1});
              DistributedDataParallel ddp(net, state);
              net.backward([](auto&, auto&) { return 1.0; });
              // Counts beyond a float's precision: all experts but the last two are at the mean.
              const int64_t mean = int64_t{1} << 26;
              const at::Tensor tokens = at::full({4}, mean, at::kLong);
              if (state.rank() == 3) tokens[2] += 1, tokens[3] -= 1;
              at::Tensor other = at::zeros({3}, at::kFloat);
              other[state.rank() == 0 ? 0 : 2] = 5;
              const at::Tensor a = at::zeros({4}, at::kDouble), b = at::ones({3}, at::kDouble);
              const auto report =
                  finalize_model_grads({&ddp}, no_tokens(), {{a, tokens, .5}, {b, other}});
              EXPECT_TRUE(at::equal(a, at::tensor({0., 0., -.5, .5}, at::kDouble)));
              // 5, 0 and 15 tokens, so the mean is 20 / 3.
              EXPECT_TRUE(at::allclose(b, at::tensor({1.001, 1.001, .999}, at::kDouble), 0, 1e-15));
              EXPECT_EQ(tokens.sum().item<int64_t>(), 0);
              ASSERT_EQ(report.entries.size(), 3u);
              EXPECT_EQ(report.entries[1].pass, "router bias");
              EXPECT_EQ(report.entries[1].group.to_string(), "tp-dp-cp [0, 1, 2, 3]");
              EXPECT_EQ(report.entries[1].operation, kAllReduceSum);
              EXPECT_EQ(report.entries[1].bytes, 7 * 8);
            },
            {.sizes = {.tensor = 2}, .log = &log});
}

TEST(RouterBiases, RefusesWhatDoesNotFit) {
  DescribedParams net;
  net.add("weight", {1});
  DistributedDataParallel ddp(net, ParallelState::single_process());
  net.backward([](auto&, auto&) { return 1.0; });
  const auto refused = [&](const RouterBias& router, const std::string& part) {
    return throws_with<UsageError>([&] { finalize_model_grads({&ddp}, no_tokens(), {router}); },
                                   part);
  };
  EXPECT_TRUE(refused({at::zeros({2}), at::zeros({3})}, "router bias 0: bias and tokens_per_exp"));
  const double infinity = std::numeric_limits<double>::infinity();
  for (const auto& [rate, text] :
       {std::pair(-1., "-1"), std::pair(std::nan(""), "nan"), std::pair(infinity, "inf")})
    EXPECT_TRUE(refused({at::zeros({2}), at::zeros({2}), rate},
                        std::string("router bias 0: found a rate of ") + text + ", allowed: >= 0"));
}

}  // namespace
}  // namespace lockstep
