// The audit of a training run on layouts of ranks as threads: measurements equal the plan, and all
// layouts of one model train the same.

#include <gtest/gtest.h>

#include <mutex>

#include "lockstep/core/check.h"
#include "lockstep/optimizer/audit_comparison.h"
#include "lockstep/planner/audit_plan.h"
#include "lockstep/tests/training/trainer_layouts.h"

namespace lockstep {
namespace {

using testing::joined;
using testing::Overrides;
using testing::run_ranks;

struct Layout {
  int64_t ranks;
  ParallelSizes sizes;
  Overrides overrides;
};

std::vector<Layout> dense_layouts() {
  const std::string tp = "parallel.tensor_model_parallel_size=2",
                    sp = "parallel.sequence_parallel=true";
  const std::string pp = "parallel.pipeline_model_parallel_size=2",
                    cp = "parallel.context_parallel_size=2";
  return {{1, {}, {}},
          {2, {}, {}},
          {2, {.tensor = 2}, {tp, sp}},
          {2, {.pipeline = 2}, {pp}},
          {4, {.tensor = 2}, {tp, sp, "ddp.use_distributed_optimizer=true"}},
          {4, {.context = 2}, {cp, "ddp.overlap_grad_reduce=true"}},
          {4, {.tensor = 2, .pipeline = 2}, {tp, pp}},
          {8, {.tensor = 2, .pipeline = 2, .context = 2}, {tp, sp, pp, cp}}};
}

std::vector<Layout> expert_layouts() {
  const std::string ep = "parallel.expert_model_parallel_size=2";
  return {{1, {}, {}},
          {2, {.expert = 2}, {ep}},
          {4, {.expert = 2}, {ep, "ddp.use_distributed_optimizer=true"}},
          {4,
           {.expert = 2},
           {ep, "ddp.use_distributed_optimizer=true",
            "ddp.data_parallel_sharding_strategy=optim_grads_params"}},
          {4,
           {.tensor = 2, .expert = 2},
           {ep, "parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"}}};
}

class TrainerAudit : public testing::TrainerLayoutsTest {
 protected:
  AuditReport audited(const Layout& layout, const Overrides& model) const {
    AuditReport report;
    std::mutex mutex;
    run_ranks(layout.ranks,
              [&](const ParallelState& state) {
                Trainer trainer(config(joined(layout.overrides, model)), state);
                const AuditReport measured = trainer.audit();
                const auto wrong =
                    audit_differences(plan_audit(trainer.config(), state.world_size()), measured);
                const std::lock_guard<std::mutex> lock(mutex);
                EXPECT_TRUE(wrong.empty())
                    << state.rank() << ": " << fmt::format("{}", fmt::join(wrong, "\n"));
                report = measured;
              },
              {.sizes = layout.sizes});
    return report;
  }

  void expect_equivalent(const std::vector<Layout>& layouts, const Overrides& model) const {
    AuditReport first;
    for (const Layout& layout : layouts) {
      const AuditReport report = audited(layout, model);
      if (first.ranks.empty()) first = report;
      const AuditComparison found = compare_audits(first, report);
      EXPECT_TRUE(found.equivalent()) << report.layout << "\n" << to_text(found);
      EXPECT_GT(found.parameters, 10);
    }
  }
};

TEST_F(TrainerAudit, OfDenseLayouts) {
  expect_equivalent(dense_layouts(), {});
  expect_equivalent(dense_layouts(), {"ddp.calculate_per_token_loss=false"});
}

TEST_F(TrainerAudit, OfExperts) {
  for (const char* scaling :
       {"ddp.calculate_per_token_loss=true", "ddp.calculate_per_token_loss=false",
        "ddp.average_in_collective=true"})
    expect_equivalent(expert_layouts(), {"model.num_experts=4", scaling});
}

TEST_F(TrainerAudit, NamesWhatAnotherConfigurationTrainsOtherwise) {
  const Layout alone = {1, {}, {}};
  const AuditReport report = audited(alone, {});
  const AuditComparison rate = compare_audits(report, audited(alone, {"optimizer.lr=0.02"}));
  ASSERT_FALSE(rate.equivalent());
  EXPECT_EQ(static_cast<int64_t>(rate.differences.size()), rate.parameters);
  EXPECT_EQ(rate.differences.front().field, "update");
  const AuditComparison means =
      compare_audits(report, audited(alone, {"ddp.calculate_per_token_loss=false"}));
  EXPECT_EQ(means.differences.front().field, "scaling");
}

}  // namespace
}  // namespace lockstep
