// Spikes of the loss and of the gradient norm: which iterations are found, against a list computed
// here from a run that does not look for them, and what happens then.

#include "lockstep/training/spikes.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::kWindow;
using testing::kZScore;
using testing::run_ranks;
using testing::throws_with;
using testing::Told;
using Fields = testing::SpikeFields;
using Outcome = testing::SpikeOutcome;
using SpikesTest = testing::SpikeRuns;

/// Whether `x` is more than kZScore deviations above the mean of the last `kWindow` of `before`.
bool is_outlier(const std::vector<double>& before, double x) {
  if (before.size() < kWindow) return false;
  const std::vector<double> last(before.end() - kWindow, before.end());
  const at::Tensor values = at::tensor(last, at::kDouble);
  const double deviation = values.std(/*unbiased=*/false).item<double>();
  return deviation > 0 && x > values.mean().item<double>() + kZScore * deviation;
}

struct Accepted {
  std::vector<double> losses, norms;
  Spike judge(const Told& told) const {
    if (is_outlier(losses, told.loss)) return Spike::loss;
    return is_outlier(norms, told.norm) ? Spike::grad_norm : Spike::none;
  }
  void add(const Told& told) {
    losses.push_back(told.loss);
    norms.push_back(told.norm);
  }
};

/// The expected report of a run whose weights do not change, from its results for each batch of
/// data.
std::vector<Told> told_with_rewind(const std::vector<Told>& batches, int64_t interval,
                                   int64_t iterations, bool* ends) {
  std::vector<Told> told;
  std::map<int64_t, Accepted> saved;
  Accepted accepted;
  int64_t iteration = 0, went_to = -1;
  *ends = false;
  for (const Told& batch : batches) {
    if (iteration == iterations) break;
    Told one = batch;
    one.iteration = iteration + 1;
    one.spike = accepted.judge(one);
    told.push_back(one);
    ++iteration;
    if (one.spike == Spike::none) accepted.add(one);
    if (one.spike != Spike::none && !saved.empty()) {
      iteration = saved.rbegin()->first;
      accepted = saved.rbegin()->second;
      *ends = went_to == iteration;
      if (*ends) break;
      went_to = iteration;
      continue;
    }
    if (iteration % interval == 0) saved[iteration] = accepted;
  }
  return told;
}

int64_t count_spikes(const std::vector<Told>& told) {
  return std::count_if(told.begin(), told.end(),
                       [](const Told& one) { return one.spike != Spike::none; });
}

TEST_F(SpikesTest, AreFoundAndSkippedOnEveryLayout) {
  const Fields skip = {"train.on_spike=skip", "optimizer.lr=0.001"};
  const Outcome alone = train(wild(skip), 1, "");
  Accepted accepted;
  for (const Told& one : alone.told) {
    EXPECT_EQ(one.spike, accepted.judge(one)) << one.iteration;
    if (one.spike == Spike::none) accepted.add(one);
  }
  EXPECT_GE(count_spikes(alone.told), 2);
  EXPECT_EQ(alone.told.size(), 40U);
  const std::vector<std::pair<int64_t, Fields>> layouts = {
      {2, {}},
      {3, {"ddp.use_distributed_optimizer=true"}},
      {2, {"parallel.pipeline_model_parallel_size=2"}},
      {2, {"parallel.tensor_model_parallel_size=2"}}};
  for (const auto& [world, layout] : layouts) {
    Fields all = skip;
    all.insert(all.end(), layout.begin(), layout.end());
    const Outcome found = train(wild(all), world, "");
    ASSERT_EQ(found.told.size(), alone.told.size());
    for (size_t i = 0; i < found.told.size(); ++i) {
      EXPECT_NEAR(found.told[i].loss, alone.told[i].loss, 1e-11 * alone.told[i].loss) << i;
      EXPECT_EQ(found.told[i].spike, alone.told[i].spike) << i;
    }
  }
}

TEST_F(SpikesTest, SkippedUpdatesChangeNoWeight) {
  const Config config = wild({"train.on_spike=skip"});
  run_ranks(1, [&](const ParallelState& state) {
    Trainer trainer(config, state);
    CheckpointReader base(base_);
    trainer.load(base, /*weights_only=*/true);
    const auto weights = [&] {
      std::vector<at::Tensor> copies;
      for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true))
        copies.push_back(tensor.values.clone());
      return at::cat(copies);
    };
    at::Tensor before = weights();
    int64_t spikes = 0, steps = 0;
    for (int64_t i = 0; i < 40; ++i) {
      const IterationMetrics metrics = trainer.train_step();
      const at::Tensor after = weights();
      EXPECT_EQ(at::equal(before, after), metrics.spike != Spike::none) << metrics.iteration;
      before = after;
      spikes += metrics.spike != Spike::none ? 1 : 0;
      steps += metrics.skipped ? 0 : 1;
    }
    EXPECT_GE(spikes, 1);
    EXPECT_EQ(trainer.progress().optimizer.num_steps, steps);
  });
}

/// The logits are 2e38 and -2e38, so the loss overflows and its gradients do not.
TEST_F(SpikesTest, AnInfiniteLossIsNotRemembered) {
  const Config config = this->config(
      calm_, {"train.on_spike=skip", "train.precision=fp32", "model.normalization=LayerNorm",
              "model.untie_embeddings_and_output_weights=true"});
  run_ranks(1, [&](const ParallelState& state) {
    Trainer trainer(config, state);
    const at::NoGradGuard no_grad;
    for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/false)) {
      if (tensor.name.ends_with("final_layernorm.weight")) tensor.values.zero_();
      if (tensor.name.ends_with("final_layernorm.bias")) tensor.values.zero_()[0] = 1e5;
      if (!tensor.name.ends_with("output_layer.weight")) continue;
      const at::Tensor column = tensor.values.view({256, 16}).zero_().select(1, 0);
      column.fill_(-2e33)[0] = 2e33;
    }
    const IterationMetrics metrics = trainer.train_step();
    EXPECT_TRUE(std::isinf(metrics.lm_loss)) << metrics.lm_loss;
    EXPECT_TRUE(std::isfinite(metrics.grad_norm));
    EXPECT_FALSE(metrics.skipped);
    EXPECT_TRUE(trainer.progress().spikes.losses.empty());
    EXPECT_TRUE(trainer.progress().spikes.grad_norms.empty());
    RunCheckpoints checkpoints(config.checkpoint, at("infinite"), state);
    EXPECT_NO_THROW(checkpoints.after_iteration(trainer, /*last=*/true));
  });
}

TEST_F(SpikesTest, AResumedRunFindsTheSame) {
  for (const int64_t world : {1, 2}) {
    const std::string folder = at(fmt::format("resumed_{}", world));
    const Fields skip = {"train.on_spike=skip", "optimizer.lr=0.001"};
    const auto with = [&](const char* more) {
      Fields all = skip;
      all.emplace_back(more);
      return all;
    };
    const Outcome whole = train(wild(skip), world, "");
    std::vector<Told> told = train(wild(with("train.train_iters=9")), world, folder).told;
    for (const char* const iterations : {"train.train_iters=17", "train.train_iters=40"}) {
      Fields all = with(iterations);
      all.push_back("checkpoint.load=" + folder);
      const Outcome next = train(config(wild_, all), world, folder);
      told.insert(told.end(), next.told.begin(), next.told.end());
    }
    EXPECT_EQ(told, whole.told);
    EXPECT_GE(count_spikes(told), 2);
  }
}

TEST_F(SpikesTest, RewindGoesBackAndLeavesOutTheSamplesSince) {
  // Without a learning rate the weights stay, so losses are those of the batches alone.
  const Fields still = {"optimizer.lr=0", "optimizer.weight_decay=0"};
  const auto with = [&](const Fields& more) {
    Fields all = still;
    all.insert(all.end(), more.begin(), more.end());
    return wild(all);
  };
  const std::vector<Told> batches = train(with({"train.train_iters=80"}), 1, "").told;
  bool ends = false;
  for (const int64_t interval : {1, 2, 3, 7}) {
    const std::vector<Told> expected = told_with_rewind(batches, interval, 30, &ends);
    for (const auto& [world, layout] : std::vector<std::pair<int64_t, Fields>>{
             {1, {}}, {3, {}}, {2, {"parallel.pipeline_model_parallel_size=2"}}}) {
      Fields more = {"train.on_spike=rewind", "train.train_iters=30",
                     fmt::format("checkpoint.save_interval={}", interval)};
      more.insert(more.end(), layout.begin(), layout.end());
      const std::string folder = at(fmt::format("rewind_{}_{}", interval, world));
      const Outcome found = train(with(more), world, folder);
      ASSERT_EQ(found.told.size(), expected.size()) << interval << ", " << world;
      for (size_t i = 0; i < expected.size(); ++i) {
        EXPECT_EQ(found.told[i].iteration, expected[i].iteration) << i;
        EXPECT_EQ(found.told[i].spike, expected[i].spike) << i;
        EXPECT_NEAR(found.told[i].loss, expected[i].loss, 1e-11 * expected[i].loss) << i;
      }
      EXPECT_EQ(found.end, ends ? RunEnd::diverged : RunEnd::done) << interval;
      if (ends) {
        EXPECT_NE(found.divergence.find("another spike, after the run had rewound"),
                  std::string::npos);
      }
      std::filesystem::remove_all(folder);
    }
    EXPECT_GE(count_spikes(expected), 1) << interval;
  }
}

TEST_F(SpikesTest, ASecondSpikeAtTheSamePlaceEndsTheRun) {
  const std::string wilder =
      folder_.write("wilder", text(240, {3, 19, 31, 48, 60, 77, 88, 101, 130, 154, 180, 203, 222}));
  const auto fields = [&](const Fields& more) {
    Fields all = {"optimizer.lr=0", "checkpoint.load=" + base_, "checkpoint.finetune=true"};
    all.insert(all.end(), more.begin(), more.end());
    return config(wilder, all);
  };
  const std::vector<Told> batches = train(fields({"train.train_iters=80"}), 1, "").told;
  bool ends = false;
  const std::vector<Told> expected = told_with_rewind(batches, 12, 60, &ends);
  ASSERT_TRUE(ends);
  const Outcome found = train(
      fields({"train.on_spike=rewind", "train.train_iters=60", "checkpoint.save_interval=12"}), 2,
      at("again"));
  EXPECT_EQ(found.end, RunEnd::diverged);
  ASSERT_EQ(found.told.size(), expected.size());
  EXPECT_EQ(found.told.back().spike, expected.back().spike);
  EXPECT_NE(found.divergence.find(fmt::format("iteration {}: another spike, after the run had "
                                              "rewound to iteration {}",
                                              expected.back().iteration, 12)),
            std::string::npos)
      << found.divergence;
}

TEST_F(SpikesTest, WithoutACheckpointToGoBackToTheUpdateIsSkipped) {
  const Fields skip = {"optimizer.lr=0.001", "train.on_spike=skip"};
  const Fields rewind = {"optimizer.lr=0.001", "train.on_spike=rewind",
                         "checkpoint.save_interval=100"};
  EXPECT_EQ(train(wild(rewind), 1, at("none")).told, train(wild(skip), 1, "").told);
}

TEST(SpikeWindow, IsFullBeforeItSaysAnything) {
  SpikeWindow window(3, 2);
  const double none = std::numeric_limits<double>::infinity();
  for (const double loss : {1.0, 2.0}) {
    window.accept(loss, 1);
    EXPECT_EQ(window.limits().loss, none);
  }
  window.accept(6, 1);
  EXPECT_DOUBLE_EQ(window.limits().loss, 3 + 2 * std::sqrt((4.0 + 1 + 9) / 3));
  EXPECT_EQ(window.limits().grad_norm, none) << "all values are the same";
  window.accept(4, 2);
  EXPECT_DOUBLE_EQ(window.limits().loss, 4 + 2 * std::sqrt((4.0 + 4 + 0) / 3));
  SpikeWindow other(2, 2);
  other.restore(window.losses(), window.grad_norms());
  EXPECT_EQ(other.losses(), (std::vector<double>{6, 4}));
  const SpikeLimits limits = window.limits();
  EXPECT_EQ(limits.judge(limits.loss, limits.grad_norm), Spike::none);
  EXPECT_EQ(limits.judge(limits.loss + 1, limits.grad_norm + 1), Spike::loss);
  EXPECT_EQ(limits.judge(0, limits.grad_norm + 1), Spike::grad_norm);
  EXPECT_EQ(limits.judge(NAN, limits.grad_norm + 1), Spike::none);
  EXPECT_EQ(limits.judge(0, none), Spike::none);
}

TEST(SpikeSettings, AreRefusedByName) {
  const auto refuses = [](const Fields& fields, const std::string& message) {
    EXPECT_TRUE(throws_with<ConfigError>([&] { parse_config("", "test", fields); }, message))
        << message;
  };
  refuses({"train.on_spike=rewind"},
          "train.on_spike = rewind: found checkpoint.save_interval that is unset, allowed: ");
  refuses({"train.on_spike=rewind", "checkpoint.save_interval=5", "checkpoint.save_optim=false"},
          "train.on_spike = rewind: found checkpoint.save_optim = false, allowed: true");
  refuses({"train.on_spike=rewind", "checkpoint.save_interval=5", "train.rampup_batch_size=2 2 10"},
          "train.on_spike = rewind: found train.rampup_batch_size");
  refuses({"train.on_spike=skip", "train.cuda_graph=step"},
          "train.on_spike = skip: found train.cuda_graph = step, allowed: none, microbatch");
  refuses({"train.on_spike=maybe"}, "train.on_spike: found ");
}

}  // namespace
}  // namespace lockstep
