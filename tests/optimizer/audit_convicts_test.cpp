// Which mistakes the audit finds without a reference: descriptions that do not match the model, and
// errors of loops between backward and the optimizer.

#include <gtest/gtest.h>

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/error.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/optimizer/audit.h"
#include "lockstep/parallel_state/collectives.h"
#include "lockstep/tests/optimizer/drawn_audit.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::AuditNet;
using testing::DescribedParams;
using testing::joined;
using testing::partial_over_tp;
using testing::run_ranks;
using testing::throws_with;

/// A model on 8 ranks of tp 2, dp 2, pp 2: a cut matrix, a norm whose gradients are terms, and a
/// table that is tied between the stages.
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

/// The differences that the audit finds on rank 1, with the description `wrong`, or with `bug`
/// instead of finalize_model_grads().
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
  const std::string norm = "rank 0, `0.norm`: terms: expected 1 x ranks [0, 1, 2, 3], measured ";
  EXPECT_SAYS(conviction("norm"), norm + "1 x ranks [0, 2]");
  EXPECT_SAYS(conviction("norm"), "rank 0, `0.norm`: description: expected ");
  EXPECT_SAYS(conviction("mean"), norm + "1/2 x ranks [0, 1, 2, 3]");
  EXPECT_SAYS(conviction("pp"), norm + "1 x ranks [0, 1, 2, 3, 4, 5, 6, 7]");
  EXPECT_SAYS(conviction("tie"),
              "rank 5, `1.table`: terms: expected 1 x ranks [1, 3, 5, 7], measured 1 x ranks "
              "[5, 7]");
  EXPECT_SAYS(conviction("tie"), "rank 4, `1.table`: counted in the norm: expected no, measured");
}

TEST(AuditConvicts, WrongFactors) {
  const Bug twice = [](const auto& models, const auto& tokens) {
    finalize_model_grads(models, tokens);
    models.front()->scale_gradients(2);
  };
  EXPECT_SAYS(conviction("", twice), "`0.cut`: terms: expected 1 x ranks [0, 2], measured 2 x");
  EXPECT_SAYS(conviction("", twice, /*averages=*/true),
              "`0.cut`: terms: expected 1/2 x ranks [0, 2], measured 1 x ranks [0, 2]");
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
  const std::string norm = "`0.norm`: terms: expected 1 x ranks [0, 1, 2, 3], measured ";
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
              "rank 0, `0.cut`: tokens: expected [4, 6], measured [4, 5, 6, 7]");
  const Bug never_divided = [](const auto& models, const auto&) {
    finalize_model_grads(models, at::zeros({}));
  };
  EXPECT_SAYS(conviction("", never_divided), "`0.cut`: tokens: expected [4, 6], measured []");
}

TEST(AuditConvicts, GradientsThatDifferWithinAParameter) {
  const Bug half = [](const auto& models, const auto& tokens) {
    finalize_model_grads(models, tokens);
    models.front()->buffers().front()->grad_view(0)[0].zero_();
  };
  EXPECT_SAYS(conviction("", half),
              "rank 0, `0.cut`: terms: expected 1 x ranks [0, 2], measured different terms in its "
              "elements: markers from 0 to ");
}

// The means of 2 micro-batches are divided by 2 twice.
TEST(AuditConvicts, ALossThatIsDividedTwice) {
  run_ranks(2, [](const ParallelState& state) {
    DescribedParams module;
    module.add("p", {5});
    DistributedDataParallelConfig config;
    config.calculate_per_token_loss = false;
    DistributedDataParallel ddp(module, state, config);
    AuditedModel model = {
        .models = {&ddp}, .modules = {&module}, .ddp = config, .num_microbatches = 2};
    const auto found = [&] {
      return joined(audit_differences(expected_audit(model), audit(model)));
    };
    EXPECT_EQ(found(), "");
    model.loss = [](const at::Tensor& losses) { return losses.mean() / 2; };
    EXPECT_EQ(found(), "");
    model.loss = [](const at::Tensor& losses) { return losses.mean() / 4; };
    EXPECT_SAYS((std::vector<std::string>{found()}),
                "rank 0, `p`: terms: expected 1/2 x ranks [0, 1], measured 1/4 x ranks [0, 1]");
    model.num_microbatches = 0;
    EXPECT_TRUE(throws_with<UsageError>([&] { (void)audit(model); },
                                        "num_microbatches: found 0 beside a loss"));
  });
}

TEST(AuditConvicts, AStepThatIsNotFinished) {
  const Bug forgotten = [](const auto& models, const auto&) { models.front()->finish_grad_sync(); };
  EXPECT_TRUE(throws_with<UsageError>([&] { (void)conviction("", forgotten); },
                                      "audit: the gradients are not final"));
}

}  // namespace
}  // namespace lockstep
