// What becomes of each gradient: integers through the real collectives against what descriptions
// say, on random layouts and models; and which mistakes that convicts without a reference.

#include "lockstep/optimizer/audit.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/optimizer/drawn_audit.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::AuditNet;
using testing::DescribedParams;
using testing::DrawnAudit;
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

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += "\n" + line;
  return text;
}

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

ParamDescription partial_over_tp() {
  return {.gradient_states = {{MeshAxis::tp, GradientState::partial_sum}}};
}

// By hand: ranks 0 and 1 are tp, ranks 0 and 2 dp.
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

// The ranks of an average: 1 / 3 of each; of a shard only the ranks that hold elements tell.
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
              EXPECT_EQ(buckets, 2);  // both ranks in one round, and the tokens
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

/// A model on 8 ranks of tp 2, dp 2, pp 2: a matrix that is cut, a norm whose gradients are terms,
/// a table that is tied between the stages.
std::unique_ptr<AuditNet> stage_net(const std::string& wrong = "") {
  auto net = std::make_unique<AuditNet>();
  ParamDescription norm = partial_over_tp(), table = {.tie = Tie{"table"}};
  if (wrong == "norm") norm = {};
  if (wrong == "mean") norm.gradient_states[MeshAxis::tp] = GradientState::partial_mean;
  if (wrong == "tie") table = {};
  if (wrong == "pp") norm.gradient_states[MeshAxis::pp] = GradientState::partial_sum;
  net->add(0, "cut", {4, 3}, {.placements = {{MeshAxis::tp, Shard{0}}}});
  net->add(0, "norm", {3}, norm);
  net->add(1, "table", {5, 3}, table);
  return net;
}

using Bug = std::function<void(const std::vector<DistributedDataParallel*>& models,
                               const std::optional<at::Tensor>& tokens)>;

/// What the audit says of the model on rank 1, when it is described as `wrong` or when `bug` stands
/// in the place of finalize_model_grads().
std::vector<std::string> conviction(const std::string& wrong, const Bug& bug = {},
                                    bool averages = false) {
  std::vector<std::string> lines;
  run_ranks(8,
            [&](const ParallelState& state) {
              const auto right = stage_net(), used = stage_net(wrong);
              DistributedDataParallelConfig config;
              if (averages) config.calculate_per_token_loss = false;
              DistributedDataParallel ddp(*used, state, config, state.rank() >= 4);
              AuditedModel model = {.models = {&ddp}, .modules = {right.get()}, .ddp = config};
              if (bug) model.finalize = [&](const auto& tokens) { bug({&ddp}, tokens); };
              const auto found = audit_differences(expected_audit(model), audit(model));
              if (state.rank() == 1) lines = found;
            },
            {.sizes = {.tensor = 2, .pipeline = 2}});
  return lines;
}

bool says(const std::vector<std::string>& lines, const std::string& text) {
  return std::any_of(lines.begin(), lines.end(),
                     [&](const std::string& line) { return line.find(text) != line.npos; });
}

#define EXPECT_SAYS(lines, text) EXPECT_TRUE(says(lines, text)) << joined(lines)

TEST(AuditConvicts, NobodyWhoIsRight) {
  EXPECT_EQ(joined(conviction("")), "");
  EXPECT_EQ(joined(conviction("", {}, /*averages=*/true)), "");
}

TEST(AuditConvicts, DescriptionsThatAreNotThoseOfTheModel) {
  const std::string norm = "rank 0, `0.norm`: terms: worked out 1 x ranks [0, 1, 2, 3], measured ";
  EXPECT_SAYS(conviction("norm"), norm + "1 x ranks [0, 2]");
  EXPECT_SAYS(conviction("norm"), "rank 0, `0.norm`: description: worked out ");
  EXPECT_SAYS(conviction("mean"), norm + "1/2 x ranks [0, 1, 2, 3]");
  EXPECT_SAYS(conviction("pp"), norm + "1 x ranks [0, 1, 2, 3, 4, 5, 6, 7]");
  EXPECT_SAYS(conviction("tie"),
              "rank 5, `1.table`: terms: worked out 1 x ranks [1, 3, 5, 7], measured 1 x ranks "
              "[5, 7]");
  EXPECT_SAYS(conviction("tie"), "rank 4, `1.table`: counted in the norm: worked out no, measured");
}

TEST(AuditConvicts, WrongFactors) {
  const Bug twice = [](const auto& models, const auto& tokens) {
    finalize_model_grads(models, tokens);
    models.front()->scale_gradients(2);
  };
  EXPECT_SAYS(conviction("", twice), "`0.cut`: terms: worked out 1 x ranks [0, 2], measured 2 x");
  EXPECT_SAYS(conviction("", twice, /*averages=*/true),
              "`0.cut`: terms: worked out 1/2 x ranks [0, 2], measured 1 x ranks [0, 2]");
  const Bug tenth = [](const auto& models, const auto& tokens) {
    finalize_model_grads(models, tokens);
    models.front()->scale_gradients(0.01);
  };
  EXPECT_SAYS(conviction("", tenth), "is no multiple of 1/48 of its gradient");
}

void add_over(DistributedDataParallel& ddp, GroupKind kind, size_t index) {
  const ProcessGroup group = ddp.parallel_state().group(kind);
  const at::Tensor grad = ddp.buffers().front()->grad_view(index);
  all_reduce(group, grad, ReduceOp::sum, "a bug").wait();
}

TEST(AuditConvicts, WrongGroupsAndPassesTooMany) {
  const auto again_over = [](GroupKind kind) -> Bug {
    return [kind](const auto& models, const auto& tokens) {
      finalize_model_grads(models, tokens);
      add_over(*models.front(), kind, 1);
    };
  };
  const std::string norm = "`0.norm`: terms: worked out 1 x ranks [0, 1, 2, 3], measured ";
  EXPECT_SAYS(conviction("", again_over(GroupKind::tp)), norm + "2 x ranks [0, 1, 2, 3]");
  EXPECT_SAYS(conviction("", again_over(GroupKind::dp)), norm + "2 x ranks [0, 1, 2, 3]");
  EXPECT_SAYS(conviction("", again_over(GroupKind::pp)),
              norm + "1 x ranks [0, 1, 2, 3, 4, 5, 6, 7]");
}

TEST(AuditConvicts, TokensOfOtherRanks) {
  const Bug summed_over_tp = [](const auto& models, const auto& tokens) {
    const at::Tensor all = tokens->clone();
    all_reduce(models.front()->parallel_state().group(GroupKind::tp), all, ReduceOp::sum, "a bug")
        .wait();
    finalize_model_grads(models, all);
  };
  EXPECT_SAYS(conviction("", summed_over_tp),
              "rank 0, `0.cut`: tokens: worked out [4, 6], measured [4, 5, 6, 7]");
  const Bug never_divided = [](const auto& models, const auto&) {
    finalize_model_grads(models, at::zeros({}));
  };
  EXPECT_SAYS(conviction("", never_divided), "`0.cut`: tokens: worked out [4, 6], measured []");
}

TEST(AuditConvicts, GradientsThatDifferWithinAParameter) {
  const Bug half = [](const auto& models, const auto& tokens) {
    finalize_model_grads(models, tokens);
    models.front()->buffers().front()->grad_view(0)[0].zero_();
  };
  EXPECT_SAYS(
      conviction("", half),
      "rank 0, `0.cut`: terms: worked out 1 x ranks [0, 2], measured different terms in its "
      "elements: markers from 0 to ");
}

TEST(AuditConvicts, AStepThatIsNotFinished) {
  const Bug forgotten = [](const auto& models, const auto&) { models.front()->finish_grad_sync(); };
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)conviction("", forgotten); },
                                      "audit: the gradients are not final"));
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
                                  .problem = "none"};
  const AuditedRank rank = {.rank = 3, .parameters = {param}};
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
