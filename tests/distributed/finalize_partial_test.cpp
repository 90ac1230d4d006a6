#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/distributed/owned_grads.h"
#include "lockstep/distributed/step_access.h"
#include "lockstep/tests/support/described_params.h"
#include "lockstep/tests/support/open_ranks.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::DescribedParams;
using testing::no_tokens;
using testing::run_ranks;
using testing::throws_with;
using enum MeshAxis;

constexpr auto kSum = GradientState::partial_sum;
constexpr auto kMean = GradientState::partial_mean;

/// What a rank sends in the passes after the data-parallel one: "operation group bytes".
std::vector<std::string> sent_after_data_parallel(const CollectiveLog& log, int64_t rank) {
  std::vector<std::string> sent;
  for (const CollectiveRecord& call : log.of_rank(rank))
    if (call.label.starts_with("gradient"))
      sent.push_back(call.operation + " " + call.group + " " + std::to_string(call.bytes));
  return sent;
}

struct Layout {
  int64_t world;
  ParallelSizes sizes;
};

const std::vector<Layout> kLayouts = {
    {2, {.tensor = 2}},
    {3, {.tensor = 3}},
    {4, {.tensor = 2}},
    {4, {.pipeline = 2}},
    {4, {.expert = 2}},
    {6, {.tensor = 2}},
    {8, {.tensor = 2, .context = 2}},
    {8, {.tensor = 2, .pipeline = 2}},
    {8, {.tensor = 2, .expert = 2}},
    {8, {.tensor = 2, .expert = 4, .expert_tensor = 1}},
    {8, {.tensor = 2, .context = 2, .expert = 2, .expert_tensor = 2}},
};

/// What each rank holds after a sum over `kind`. `terms`: one for each rank of the world; powers of
/// two tell which ranks were added.
std::vector<double> summed(const RankGrids& grids, GroupKind kind,
                           const std::vector<double>& terms) {
  std::vector<double> sums(terms.size(), 0.0);
  for (size_t rank = 0; rank < terms.size(); ++rank)
    for (const int64_t member : grids.group_of(kind, static_cast<int64_t>(rank)))
      sums[rank] += terms[static_cast<size_t>(member)];
  return sums;
}

struct Case {
  const char* name;
  ParamDescription description;
  std::vector<GroupKind> groups;  ///< groups over which it is summed
  bool mean = false;              ///< whether the last of them averages
};

std::vector<Case> cases() {
  using K = GroupKind;
  return {
      {"complete", {}, {K::dp_cp}},
      {"sharded", {.placements = {{tp, Shard{0}}}}, {K::dp_cp}},
      {"norm", {.gradient_states = {{tp, kSum}}}, {K::dp_cp, K::tp}},
      {"mean", {.gradient_states = {{tp, kMean}}}, {K::dp_cp, K::tp}, true},
      {"stages", {.gradient_states = {{pp, kSum}}}, {K::dp_cp, K::pp}},
      {"both", {.gradient_states = {{tp, kSum}, {pp, kSum}}}, {K::dp_cp, K::tp, K::pp}},
      {"expert", {.is_expert = true}, {K::expert_dp}},
      {"expert norm",
       {.gradient_states = {{etp, kSum}}, .is_expert = true},
       {K::expert_dp, K::expert_tp}},
      {"expert shared",
       {.gradient_states = {{ep, kSum}}, .is_expert = true},
       {K::expert_dp, K::ep}},
      {"expert mean",
       {.gradient_states = {{ep, kMean}}, .is_expert = true},
       {K::expert_dp, K::ep},
       true},
  };
}

TEST(PartialGradients, EachAxisIsReducedOnceOverItsOwnGroup) {
  for (const Layout& layout : kLayouts) {
    ParallelSizes sizes = layout.sizes;
    sizes.world_size = layout.world;
    const RankGrids grids(sizes);
    run_ranks(layout.world,
              [&](const ParallelState& state) {
                DescribedParams net;
                for (const Case& test : cases()) net.add(test.name, {3}, test.description);
                DistributedDataParallel ddp(net, state);
                net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
                finalize_model_grads({&ddp}, no_tokens());
                for (const Case& test : cases()) {
                  std::vector<double> terms;
                  for (int64_t rank = 0; rank < layout.world; ++rank) terms.push_back(1 << rank);
                  for (const GroupKind kind : test.groups) terms = summed(grids, kind, terms);
                  double expected = terms[static_cast<size_t>(state.rank())];
                  if (test.mean) expected /= static_cast<double>(grids.size(test.groups.back()));
                  EXPECT_TRUE(at::equal(net.grad(test.name), at::full({3}, expected, at::kDouble)))
                      << test.name << " on rank " << state.rank() << " of " << layout.world << ": "
                      << net.grad(test.name)[0].item<double>() << ", expected " << expected;
                }
              },
              {.sizes = layout.sizes});
  }
}

TEST(PartialGradients, SequenceParallelNormEqualsOneProcess) {
  // Eight tokens that the ranks of tp split, so each rank has a part of the norm's gradient.
  const at::Tensor tokens = at::sin(at::arange(8 * 5, at::kDouble) * 0.7).view({8, 5});
  const auto loss = [](const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias) {
    return at::tanh(at::layer_norm(x, {5}, weight, bias)).square().sum();
  };
  at::Tensor weight = at::ones({5}, at::kDouble), bias = at::zeros({5}, at::kDouble);
  weight.set_requires_grad(true);
  bias.set_requires_grad(true);
  (loss(tokens, weight, bias) / 8).backward();
  for (const int64_t ranks : {1, 2, 4, 8}) {
    CollectiveLog log;
    run_ranks(
        ranks,
        [&](const ParallelState& state) {
          DescribedParams net;
          const ParamDescription norm{.gradient_states = {{tp, kSum}}, .apply_weight_decay = false};
          net.add("weight", {5}, norm).add("bias", {5}, norm);
          DistributedDataParallel ddp(net, state);
          {
            const at::NoGradGuard no_grad;
            at::Tensor(net["weight"]).fill_(1);
          }
          loss(tokens.chunk(ranks)[static_cast<size_t>(state.rank())], net["weight"], net["bias"])
              .backward();
          const FinalizeReport report = finalize_model_grads({&ddp}, at::full({}, 8));
          EXPECT_TRUE(at::allclose(net.grad("weight"), weight.grad(), 1e-14, 1e-15));
          EXPECT_TRUE(at::allclose(net.grad("bias"), bias.grad(), 1e-14, 1e-15));
          if (ranks == 1) return;
          ASSERT_EQ(report.entries.size(), 3u);
          EXPECT_EQ(report.entries[1].pass, "partial gradients");
          EXPECT_EQ(report.entries[1].group.name(), "tp");
          EXPECT_EQ(report.entries[1].group.ranks(), state.group(GroupKind::tp).ranks());
          EXPECT_EQ(report.entries[1].operation, kAllReduceSum);
          EXPECT_TRUE(to_string(report.entries[1])
                          .starts_with("partial gradients: all-reduce sum over tp [0, 1"));
          EXPECT_EQ(report.entries[1].bytes, 80);
          EXPECT_EQ(report.entries[1].parameters, 2);
        },
        {.sizes = {.tensor = ranks}, .log = &log});
    // One message for both, since they are adjacent.
    const std::vector<std::string> expected =
        ranks == 1 ? std::vector<std::string>{}
                   : std::vector<std::string>{"all_reduce (sum) tp 80"};
    EXPECT_EQ(sent_after_data_parallel(log, 0), expected);
  }
}

TEST(PartialGradients, NothingIsSentWhereNothingIsPartial) {
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("a", {3}).add("b", {4}, {.placements = {{tp, Shard{0}}}});
              net.add("e", {2}, {.placements = {{ep, Shard{0}}}, .is_expert = true});
              DistributedDataParallel ddp(net, state);
              net.backward([](auto&, auto&) { return 1.0; });
              const FinalizeReport report = finalize_model_grads({&ddp}, no_tokens());
              for (const auto& entry : report.entries)
                EXPECT_TRUE(entry.pass == "data-parallel" || entry.pass == "num_tokens")
                    << entry.pass;
            },
            {.sizes = {.tensor = 2, .expert = 2}, .log = &log});
  for (int64_t rank = 0; rank < 4; ++rank) EXPECT_TRUE(sent_after_data_parallel(log, rank).empty());
}

TEST(PartialGradients, SmallOnesShareAMessageAndLargeOnesLieWhereTheyAre) {
  // 9 norms of 20,000 doubles (160 kB) between complete matrices: 6 fit into the buffer of 1 MiB, 3
  // are left. One of 100,000 doubles goes alone.
  CollectiveLog log;
  run_ranks(
      2,
      [](const ParallelState& state) {
        DescribedParams net;
        const ParamDescription partial{.gradient_states = {{tp, kSum}}};
        for (int i = 0; i < 9; ++i) {
          net.add("norm" + std::to_string(i), {20'000}, partial);
          net.add("matrix" + std::to_string(i), {10});
        }
        net.add("large", {100'000}, partial);
        DistributedDataParallel ddp(net, state);
        net.backward([&](const std::string& name, const at::Tensor& param) {
          return at::arange(param.numel(), at::kDouble) + static_cast<double>(name.back()) +
                 static_cast<double>(state.rank());
        });
        finalize_model_grads({&ddp}, no_tokens());
        for (const auto& [name, param] : net.params()) {
          const bool complete = name.starts_with("matrix");
          const double character = static_cast<double>(name.back());
          const at::Tensor index = at::arange(param.numel(), at::kDouble) + character;
          EXPECT_TRUE(at::equal(param.grad(), complete ? index + state.rank() : 2 * index + 1))
              << name;
        }
      },
      {.sizes = {.tensor = 2}, .log = &log});
  EXPECT_EQ(sent_after_data_parallel(log, 1),
            (std::vector<std::string>{"all_reduce (sum) tp 800000", "all_reduce (sum) tp 960000",
                                      "all_reduce (sum) tp 480000"}));
}

TEST(PartialGradients, ShardsOfTheDistributedOptimizerSendTheirShareAlone) {
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("norm", {256}, {.gradient_states = {{tp, kSum}}}).add("matrix", {512});
              DistributedDataParallelConfig config;
              config.use_distributed_optimizer = true;
              DistributedDataParallel ddp(net, state, config);
              net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
              finalize_model_grads({&ddp}, at::full({}, 1.0));
              const ParamAndGradBuffer& buffer = *ddp.buffers().front();
              const auto& norm = buffer.layout().slots[0];
              for (const ElementRange& owned : buffer.owned())
                for (int64_t i = owned.start; i < owned.end; ++i) {
                  const bool in_norm = i >= norm.start && i < norm.end;
                  const double matrix = state.rank() % 2 == 0 ? 5 : 10;
                  EXPECT_EQ(buffer.grad_data()[i].item<double>(), (in_norm ? 15 : matrix) / 2) << i;
                }
            },
            {.sizes = {.tensor = 2}, .log = &log});
  // The buffer has 768 elements: the norm's last 256 lie in the second shard.
  EXPECT_TRUE(sent_after_data_parallel(log, 0).empty());
  EXPECT_EQ(sent_after_data_parallel(log, 2),
            (std::vector<std::string>{"all_reduce (sum) tp 2048"}));
}

TEST(PartialGradients, StagesMayHoldOtherParametersBetweenTheirOwn) {
  // 312 KiB each, so they are reduced in place.
  for (const bool distributed : {false, true})
    run_ranks(4,
              [&](const ParallelState& state) {
                DescribedParams net;
                const ParamDescription partial{.gradient_states = {{pp, kSum}}};
                net.add("a", {40'000}, partial);
                if (state.rank() >= 2) net.add("between", {700});
                net.add("b", {40'000}, partial);
                if (state.rank() < 2) net.add("last", {500});
                DistributedDataParallelConfig config;
                config.use_distributed_optimizer = distributed;
                DistributedDataParallel ddp(net, state, config);
                net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
                finalize_model_grads({&ddp}, no_tokens());
                const ParamAndGradBuffer& buffer = *ddp.buffers().front();
                int64_t owned = 0;
                for (size_t i = 0; i < buffer.params().size(); ++i) {
                  if (buffer.params()[i].name.size() > 1) continue;
                  const auto& slot = buffer.layout().slots[i];
                  for (const at::Tensor& part : owned_grads(buffer, {slot.start, slot.end})) {
                    EXPECT_TRUE(part.eq(15).all().item<bool>()) << distributed;
                    owned += part.numel();
                  }
                }
                EXPECT_GE(owned, distributed ? 39'000 : 80'000);
              },
              {.sizes = {.pipeline = 2}, .timeout = std::chrono::seconds(5)});
}

TEST(PartialGradients, AreNotFinalBeforeTheyAreReducedAlsoWhereGradientsAreAverages) {
  const std::pair<ParamDescription, bool> variants[] = {
      {{}, false},
      {{.gradient_states = {{tp, kSum}}}, true},
      {{.tie = Tie{"table"}}, true},
      {{.gradient_states = {{ep, kSum}}, .is_expert = true}, false}};  // its group has one rank
  run_ranks(4,
            [&](const ParallelState& state) {
              for (const auto& [description, needs_finalize] : variants) {
                DescribedParams net;
                net.add("plain", {3}).add("described", {3}, description);
                DistributedDataParallelConfig config;
                config.calculate_per_token_loss = false;
                DistributedDataParallel ddp(net, state, config);
                net.backward([](auto&, auto&) { return 1.0; });
                ddp.finish_grad_sync();
                const auto ask = [&] { detail::StepAccess::require_final_gradients(ddp, "step"); };
                EXPECT_TRUE(!needs_finalize ||
                            throws_with<UsageError>(ask, "call finalize_model_grads()"));
                if (!needs_finalize) EXPECT_NO_THROW(ask());
                finalize_model_grads({&ddp});
                EXPECT_NO_THROW(ask());
              }
            },
            {.sizes = {.tensor = 2, .pipeline = 2}});
}

TEST(FinalizeReport, NamesTheReductionOverOptimizerInstances) {
  CollectiveLog log;
  run_ranks(4,
            [](const ParallelState& state) {
              DescribedParams net;
              net.add("weight", {500}).add("expert", {100}, {.is_expert = true});
              DistributedDataParallelConfig config;
              config.use_distributed_optimizer = true;
              DistributedDataParallel ddp(net, state, config);
              net.backward([](auto&, auto&) { return 1.0; });
              std::vector<std::string> entries;
              for (const auto& e : finalize_model_grads({&ddp}, no_tokens()).entries)
                if (e.pass == "data-parallel")
                  entries.push_back(to_string(e.operation) + " " + e.group.to_string() + " " +
                                    std::to_string(e.bytes));
              const std::string inside = state.rank() < 2 ? " [0, 1] " : " [2, 3] ";
              const std::string across = state.rank() % 2 == 0 ? "[0, 2] " : "[1, 3] ";
              EXPECT_EQ(entries, (std::vector<std::string>{
                                     "reduce-scatter sum intra-expert-dp" + inside + "1024",
                                     "all-reduce sum inter-optimizer " + across + "512",
                                     "reduce-scatter sum intra-dp-cp" + inside + "4096",
                                     "all-reduce sum inter-optimizer " + across + "2048"}));
            },
            {.sizes = {.optimizer_instances = 2}, .log = &log});
  int64_t bytes = 0;
  for (const CollectiveRecord& call : log.of_rank(0))
    if (call.group == "inter-optimizer") bytes += call.bytes;
  EXPECT_EQ(bytes, 2560);
}

TEST(PartialGradients, G65G67ExpertsAreAveragedOverAllTokensAtAnySize) {
  // Ranks that do not exist all send what this one sends: 1 for dense parameters, and ep for
  // experts, which see the tokens of ep times as many ranks. Both averages are exactly 1.
  const std::vector<std::pair<int64_t, int64_t>> sizes = {{33, 11}, {70, 14}, {78, 6}, {90, 10},
                                                          {8, 2},   {7, 7},   {49, 1}, {96, 32}};
  for (const auto& [dp_cp, edp] : sizes)
    for (const bool in_collective : {false, true}) {
      const int64_t experts = dp_cp / edp;
      const ParallelState state = ParallelState::planning_rank(
          {.world_size = dp_cp, .expert = experts}, /*rank=*/dp_cp - 1);
      DescribedParams net;
      net.add("dense", {2}).add("expert", {2}, {.placements = {{ep, Shard{0}}}, .is_expert = true});
      DistributedDataParallelConfig config;
      config.calculate_per_token_loss = false;
      config.average_in_collective = in_collective;
      DistributedDataParallel ddp(net, state, config);
      net.backward([&](const std::string& name, auto&) {
        return name == "dense" ? 1.0 : static_cast<double>(experts);
      });
      finalize_model_grads({&ddp});
      EXPECT_DOUBLE_EQ(net.grad("dense")[1].item<double>(), 1) << dp_cp;
      EXPECT_DOUBLE_EQ(net.grad("expert")[1].item<double>(), 1) << dp_cp << " " << edp;
    }
}

TEST(PartialGradients, G64PowersOfTwoTellTheGroup) {
  // World 4, per-token loss. etp 1: the expert-data-parallel group has all ranks; etp 2 with tp 1:
  // it has every second rank.
  const std::vector<std::pair<ParallelSizes, std::vector<double>>> tables = {
      {{.tensor = 2, .expert_tensor = 1}, {15, 15, 15, 15}},
      {{.tensor = 1, .expert_tensor = 2}, {5, 10, 5, 10}}};
  for (const auto& table : tables) {
    const std::vector<double>& expected = table.second;
    run_ranks(4,
              [&](const ParallelState& state) {
                DescribedParams net;
                net.add("expert", {5}, {.is_expert = true});
                DistributedDataParallel ddp(net, state);
                net.backward([&](auto&, auto&) { return static_cast<double>(1 << state.rank()); });
                finalize_model_grads({&ddp}, no_tokens());
                EXPECT_EQ(net.grad("expert")[4].item<double>(),
                          expected[static_cast<size_t>(state.rank())]);
              },
              {.sizes = table.first});
  }
}

TEST(PartialGradients, ARankThatRefusesTellsTheOthers) {
  const auto errors = testing::errors_of_open_ranks(
      2,
      [](const ParallelState& state) {
        DescribedParams net;
        net.add("norm", {3}, {.gradient_states = {{tp, kSum}}});
        DistributedDataParallel ddp(net, state);
        net.backward([](auto&, auto&) { return 1.0; });
        finalize_model_grads({&ddp}, at::full({}, state.rank() == 0 ? -1 : 1));
      },
      {.sizes = {.tensor = 2}});
  EXPECT_EQ(errors[0], "finalize_model_grads: num_tokens: found -1, allowed: a count >= 0");
  EXPECT_NE(errors[1].find("found -1, allowed: a count >= 0"), std::string::npos) << errors[1];
}

}  // namespace
}  // namespace lockstep
