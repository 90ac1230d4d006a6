// The gradient norm of each parameter group is that of the same parameters on one process.

#include <gtest/gtest.h>

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/optimizer/group_grad_norms.h"
#include "lockstep/tests/training/telemetry_runs.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::Settings;
using testing::telemetry_layouts;
using testing::TelemetryRuns;

const Settings kGroupNorms = {"train.log_grad_norm_per_group=true", "optimizer.decoupled_lr=0.02"};

/// libtorch's norms of the gradients of a run's one iteration: for the matrices, for the embedding,
/// which has a learning rate of its own, and for the vectors, which do not decay.
std::vector<double> norms_by_libtorch(const Config& config) {
  Trainer trainer(config, ParallelState::single_process());
  trainer.train_step();
  std::map<std::string, std::vector<at::Tensor>> gradients;
  for (const auto& item : trainer.model().named_parameters())
    gradients[item.key().starts_with("embedding") ? "embedding"
              : item.value().dim() == 1           ? "vectors"
                                                  : "matrices"]
        .push_back(item.value().grad().flatten());
  std::vector<double> norms;
  for (const char* group : {"matrices", "embedding", "vectors"})
    norms.push_back(at::cat(gradients.at(group)).norm().item<double>());
  return norms;
}

TEST(GroupNorms, AreThoseOfOneProcessOnEveryLayout) {
  const TelemetryRuns runs;
  const Settings one_step = {"train.train_iters=1", "train.global_batch_size=12"};
  std::map<bool, std::vector<double>> expected;  // by whether there are experts
  for (const auto& [name, world, settings] : telemetry_layouts()) {
    SCOPED_TRACE(name);
    const bool experts = name == "ep2";
    Settings model = one_step;
    if (experts) model.emplace_back("model.num_experts=4");
    if (!expected.contains(experts))
      expected[experts] = norms_by_libtorch(runs.config(kGroupNorms, model));
    Settings all = kGroupNorms;
    all.insert(all.end(), settings.begin(), settings.end());
    for (const auto& iterations : runs.run(runs.config(all, one_step), world)) {
      const IterationMetrics& metrics = iterations.front();
      ASSERT_EQ(metrics.grad_norms.size(), 3u);
      EXPECT_EQ(metrics.grad_norms[0].name, "default");
      EXPECT_EQ(metrics.grad_norms[1].name, "max_lr 0.02");
      EXPECT_EQ(metrics.grad_norms[2].name, "wd_mult 0");
      double squares = 0;
      for (size_t i = 0; i < 3; ++i) {
        const double wanted = expected[experts][i];
        EXPECT_NEAR(metrics.grad_norms[i].value, wanted, 1e-12 * wanted);
        squares += std::pow(metrics.grad_norms[i].value, 2);
      }
      EXPECT_NEAR(std::sqrt(squares), metrics.grad_norm, 1e-12 * metrics.grad_norm);
    }
  }
}

TEST(GroupNorms, CostOneAllReduceWhereSeveralRanksHoldTheModel) {
  const TelemetryRuns runs;
  for (const auto& [layout, groups] :
       {std::pair(Settings{"parallel.tensor_model_parallel_size=2"}, int64_t{1}),
        std::pair(Settings{}, int64_t{0})}) {
    CollectiveLog log;
    runs.run(runs.config(layout, {"train.log_grad_norm_per_group=true", "train.train_iters=3"}), 2,
             &log);
    int64_t calls = 0;
    for (const CollectiveRecord& record : log.of_rank(0)) {
      if (record.label != "gradient norms of groups") continue;
      ++calls;
      EXPECT_EQ(record.bytes, 16);  // the default group, and norms' weights
    }
    EXPECT_EQ(calls, 3 * groups);
  }
}

TEST(GroupNorms, TheLossScaleIsTakenOut) {
  const TelemetryRuns runs;
  const auto norms = [&](const char* scale) {
    return runs.run(runs.config(kGroupNorms, {std::string("optimizer.loss_scale=") + scale}), 1)
        .front()
        .front()
        .grad_norms;
  };
  const auto plain = norms("1"), scaled = norms("1024");
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(plain[i].value, scaled[i].value);
}

TEST(LearningRates, AreToldOfEachGroup) {
  const TelemetryRuns runs;
  const IterationMetrics metrics =
      runs.run(runs.config({"optimizer.decoupled_lr=0.02"}), 1).front().front();
  ASSERT_EQ(metrics.learning_rates.size(), 3u);
  EXPECT_EQ(metrics.learning_rates[0].name, "default");
  EXPECT_EQ(metrics.learning_rates[0].value, 0.01);
  EXPECT_EQ(metrics.learning_rates[0].value, metrics.learning_rate);
  std::map<std::string, double> rates;
  for (const auto& [name, value] : metrics.learning_rates) rates[name] = value;
  EXPECT_EQ(rates, (std::map<std::string, double>{
                       {"default", 0.01}, {"max_lr 0.02", 0.02}, {"wd_mult 0", 0.01}}));
}

}  // namespace
}  // namespace lockstep
