// The effect on each gradient: integers through the real collectives compared with the
// descriptions, on random layouts and models.

#include "lockstep/optimizer/audit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/tests/optimizer/drawn_audit.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::DescribedParams;
using testing::DrawnAudit;
using testing::joined;
using testing::partial_over_tp;
using testing::RandomCase;
using testing::run_ranks;
using testing::throws_with;

const std::vector<ParallelSizes> kWorlds = {
    {},
    {.world_size = 2},
    {.world_size = 3},
    {.world_size = 4},
    {.world_size = 2, .tensor = 2},
    {.world_size = 3, .tensor = 3},
    {.world_size = 4, .tensor = 2},
    {.world_size = 4, .tensor = 4},
    {.world_size = 6, .tensor = 3},
    {.world_size = 2, .pipeline = 2},
    {.world_size = 3, .pipeline = 3},
    {.world_size = 4, .pipeline = 2},
    {.world_size = 4, .pipeline = 4},
    {.world_size = 6, .pipeline = 3},
    {.world_size = 8, .tensor = 2, .pipeline = 2},
    {.world_size = 4, .context = 2},
    {.world_size = 8, .tensor = 2, .context = 2},
    {.world_size = 8, .tensor = 2, .pipeline = 2, .context = 2},
    {.world_size = 2, .expert = 2},
    {.world_size = 4, .expert = 2},
    {.world_size = 4, .expert = 4},
    {.world_size = 3, .expert = 3},
    {.world_size = 8, .tensor = 2, .expert = 2},
    {.world_size = 4, .tensor = 2, .expert = 2, .expert_tensor = 1},
    {.world_size = 4, .pipeline = 2, .expert = 2},
    {.world_size = 4, .optimizer_instances = 2},
    {.world_size = 8, .tensor = 2, .optimizer_instances = 2},
    {.world_size = 8, .expert = 2, .optimizer_instances = 2},
};

TEST(Audit, WhatIsMeasuredIsWhatDescriptionsSayOnRandomLayouts) {
  std::atomic<int64_t> cases = 0, parameters = 0, sums = 0;
  testing::run_random_cases(560, kWorlds, [&](const ParallelState& state, RandomCase& one) {
    DrawnAudit drawn(one.seed, state);
    one.text = drawn.text();
    const AuditedModel model = drawn.model();
    const AuditReport worked_out = expected_audit(model), measured = audit(model);
    const std::vector<std::string> lines = audit_differences(worked_out, measured);
    one.require(lines.empty(), joined(lines));
    one.require(worked_out == measured, "the reports differ where no line says so");
    if (state.rank() != 0) return;
    ++cases;
    for (const AuditedRank& rank : measured.ranks)
      for (const AuditedParameter& param : rank.parameters) {
        ++parameters;
        for (const AuditTerms& terms : param.terms) sums += terms.ranks.size() > 1 ? 1 : 0;
      }
  });
  EXPECT_GT(cases.load(), 0);
  EXPECT_GT(parameters.load(), 2 * cases.load());
  EXPECT_GT(sums.load(), 0);
  RecordProperty("cases", std::to_string(cases));
  RecordProperty("parameters", std::to_string(parameters));
}

// Written by hand: ranks 0 and 1 form tp, ranks 0 and 2 dp.
TEST(Audit, NamesTheRanksTheFactorAndTheDivisor) {
  run_ranks(
      4,
      [](const ParallelState& state) {
        DescribedParams module;
        module.add("cut", {4, 2}, {.placements = {{MeshAxis::tp, Shard{0}}}});
        module.add("mean", {2}, {.gradient_states = {{MeshAxis::tp, GradientState::partial_mean}}});
        module.add("terms", {3}, partial_over_tp());
        DistributedDataParallel ddp(module, state);
        const AuditReport report = audit({.models = {&ddp}});
        EXPECT_EQ(report.layout, "tp 2, dp 2");
        const std::vector<AuditedParameter>& of_3 = report.ranks[3].parameters;
        EXPECT_EQ(of_3[0].name, "cut");
        EXPECT_EQ(of_3[0].terms, (std::vector<AuditTerms>{{1, 1, {1, 3}}}));
        EXPECT_EQ(of_3[1].terms, (std::vector<AuditTerms>{{1, 2, {0, 1, 2, 3}}}));
        EXPECT_EQ(of_3[2].terms, (std::vector<AuditTerms>{{1, 1, {0, 1, 2, 3}}}));
        EXPECT_EQ(of_3[0].token_ranks, (std::vector<int64_t>{1, 3}));
        EXPECT_EQ(of_3[0].reduction,
                  "bucket 1 of 1, 3 parameters, all-reduce sum over dp-cp [1, 3]");
        EXPECT_TRUE(of_3[0].counted);
        EXPECT_FALSE(of_3[2].counted);
        EXPECT_TRUE(report.ranks[2].parameters[2].counted);
        EXPECT_EQ(of_3[0].update, "");
      },
      {.sizes = {.tensor = 2}});
}

// The ranks of an average count 1 / 3 each. For a shard, only the ranks that hold elements report.
TEST(Audit, NamesAveragesAndShards) {
  run_ranks(3, [](const ParallelState& state) {
    DescribedParams module;
    module.add("p", {130});
    DistributedDataParallelConfig config;
    config.calculate_per_token_loss = false;
    config.use_distributed_optimizer = true;
    DistributedDataParallel ddp(module, state, config);
    const AuditReport report = audit({.models = {&ddp}});
    const auto part = [&](size_t rank) { return report.ranks[rank].parameters.front(); };
    EXPECT_EQ(part(0).terms, (std::vector<AuditTerms>{{1, 3, {0, 1, 2}}}));
    EXPECT_TRUE(part(0).token_ranks.empty());
    EXPECT_EQ(part(0).last, 128);  // of 384, padding included
    EXPECT_EQ(part(1).first, 128);
    EXPECT_EQ(part(1).last, 130);
    EXPECT_EQ(part(2).last, 0);
    EXPECT_TRUE(part(2).terms.empty());
    EXPECT_FALSE(part(2).counted);
  });
}

// The whole model has 8 + 2 + 3 elements, whichever rank reports. Each counts once in the norm.
TEST(Audit, NamesWhatDoesNotDependOnTheLayout) {
  for (const int64_t tensor : {1, 2})
    for (const bool sharded : {false, true})
      run_ranks(4,
                [&](const ParallelState& state) {
                  DescribedParams module;
                  module.add("cut", {8 / tensor}, {.placements = {{MeshAxis::tp, Shard{0}}}});
                  module.add("mean", {2},
                             {.gradient_states = {{MeshAxis::tp, GradientState::partial_mean}}});
                  module.add("terms", {3}, partial_over_tp());
                  DistributedDataParallelConfig config;
                  config.use_distributed_optimizer = sharded;
                  DistributedDataParallel ddp(module, state, config);
                  const AuditReport report = audit({.models = {&ddp}, .num_microbatches = 3});
                  EXPECT_EQ(trained_elements(report), 13);
                  for (const AuditedRank& rank : report.ranks) {
                    EXPECT_EQ(rank.norm_elements, 13);
                    EXPECT_EQ(rank.zero_elements, 13);
                    for (const AuditedParameter& param : rank.parameters) {
                      EXPECT_EQ(param.effect,
                                param.last == 0 ? "" : "every term x 1, divided by all tokens");
                      EXPECT_EQ(param.replicas, sharded ? 1 : 4 / tensor);
                      EXPECT_EQ(param.copies, param.name == "cut" ? 1 : tensor);
                    }
                  }
                },
                {.sizes = {.tensor = tensor}});
}

TEST(Audit, TellsHowTheUpdateScalesGradients) {
  const ParallelState state = ParallelState::single_process();
  const auto update = [&](double clip) {
    DescribedParams module;
    module.add("p", {2});
    DistributedDataParallel ddp(module, state);
    OptimizerConfig config;
    config.clip_grad = clip;
    Optimizer optimizer({&ddp}, config);
    const AuditedModel model = {
        .models = {&ddp}, .modules = {&module}, .optimizer = &optimizer, .config = config};
    EXPECT_EQ(joined(audit_differences(expected_audit(model), audit(model))), "");
    return audit(model).ranks[0].parameters[0].update;
  };
  EXPECT_TRUE(update(0).ends_with(", wd_mult 1, gradients x 1 / loss scale")) << update(0);
  EXPECT_TRUE(update(0.25).ends_with("gradients x 1 / loss scale, norm at most 0.25"));
}

TEST(Audit, LeavesWeightsAndOptimizerAndSendsWhatItSays) {
  testing::CollectiveLog log;
  run_ranks(2,
            [&](const ParallelState& state) {
              DescribedParams module;
              module.add("p", {5});
              DistributedDataParallel ddp(module, state);
              Optimizer optimizer({&ddp}, {});
              const auto step = [&] {
                ddp.zero_grad();
                module.backward([](auto&, const at::Tensor&) { return 3.0; });
                finalize_model_grads({&ddp}, at::ones({}));
                optimizer.step();
              };
              step();
              const at::Tensor before = module["p"].detach().clone();
              const size_t calls = log.of_rank(state.rank()).size();
              (void)audit({.models = {&ddp}, .optimizer = &optimizer});
              EXPECT_TRUE(at::equal(before, module["p"].detach()));
              EXPECT_EQ(ddp.state_text(), "idle");
              EXPECT_EQ(module.grad("p").abs().sum().item<double>(), 0);
              EXPECT_EQ(optimizer.num_steps(), 1);
              int64_t buckets = 0;
              const auto made = log.of_rank(state.rank());
              for (size_t i = calls; i < made.size(); ++i)
                if (made[i].label.starts_with("bucket")) {
                  ++buckets;
                  EXPECT_EQ(made[i].bytes, 5 * 8);
                  EXPECT_EQ(made[i].group, "dp-cp");
                }
              EXPECT_EQ(buckets, 2);  // one round for both ranks, one for the tokens
              step();
            },
            {.log = &log});
}

TEST(Audit, RefusesAStepThatIsUnderWay) {
  const ParallelState state = ParallelState::single_process();
  DescribedParams module;
  module.add("p", {2});
  DistributedDataParallel ddp(module, state);
  {
    const auto unsynchronized = ddp.no_sync();
    module.backward([](auto&, const at::Tensor&) { return 1.0; });
  }
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)audit({.models = {&ddp}}); },
                                      "audit: the state is accumulating 1, allowed: idle, ready"));
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)expected_audit({.models = {&ddp}}); },
                                      "expected_audit: found 0 modules, allowed: as many as"));
}

TEST(AuditReport, GoesThroughJsonAndText) {
  const AuditedParameter param = {.name = "a",
                                  .shape = {2, 3},
                                  .description = "dense",
                                  .reduction = "r",
                                  .last = 6,
                                  .terms = {{1, 2, {0, 3}}},
                                  .token_ranks = {0},
                                  .counted = true,
                                  .update = "adam",
                                  .tie = "t",
                                  .copies = 2,
                                  .replicas = 3,
                                  .effect = "e",
                                  .problem = "none"};
  const AuditedRank rank = {
      .rank = 3, .norm_elements = 7, .zero_elements = 8, .parameters = {param}};
  EXPECT_EQ(parse_audited_rank(to_json(rank), "here"), rank);
  EXPECT_TRUE(
      throws_with<FileError>([] { (void)parse_audited_rank("{}", "x"); }, "x: no audit of a rank"));
  const std::string text = to_text({.layout = "one rank", .scaling = "per-token", .ranks = {rank}});
  EXPECT_NE(text.find("a [2, 3]: dense\n  r\n  gradient: 1/2 x ranks [0, 3], divided by the tokens "
                      "of ranks [0]\n"),
            text.npos)
      << text;
  EXPECT_NE(text.find("held by ranks [3], counted in the norm by [3]"), text.npos) << text;
}

}  // namespace
}  // namespace lockstep
