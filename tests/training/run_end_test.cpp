#include "lockstep/training/run_end.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <limits>
#include <map>
#include <random>
#include <set>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/skipped_steps.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;

TEST(RunEnd, TheStrongestWishOfAnyRankCounts) {
  constexpr int kWishes = static_cast<int>(RunEnd::launcher_lost) + 1;
  std::mt19937_64 random(1);
  for (const int64_t ranks : {1, 2, 3, 64, 1000, 100'000})
    for (int trial = 0; trial < 50; ++trial) {
      RunEnd strongest = RunEnd::none;
      double sum = 0;
      const bool all = trial % 2 == 0;
      for (int64_t rank = 0; rank < ranks; ++rank) {
        const auto wish =
            static_cast<RunEnd>(all || rank == 0 ? random() % kWishes : trial / 2 % kWishes);
        strongest = std::max(strongest, wish);
        sum += encode_run_end(wish, ranks);
      }
      ASSERT_EQ(agreed_end(sum, ranks), strongest) << ranks << " ranks, trial " << trial;
    }
}

class RunEndTest : public ::testing::Test {
 protected:
  RunEndTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const std::vector<std::string>& overrides = {}) const {
    std::vector<std::string> all = {"data.path=" + path_};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_config(
        "model { num_layers: 1 hidden_size: 16 num_attention_heads: 2 seq_length: 16 } "
        "optimizer { lr: 0.01 lr_decay_style: \"constant\" } "
        "train { global_batch_size: 6 micro_batch_size: 1 train_iters: 12 eval_iters: 1 }",
        "test", all);
  }

  /// Makes the gradients infinite on rank 1 in `bad` iterations. The losses stay finite.
  static void spoil(Trainer& trainer, const ParallelState& state,
                    const std::function<bool(int64_t iteration)>& bad) {
    if (state.rank() != 1) return;
    trainer.model().parameters()[0].register_hook([&trainer, bad](const at::Tensor& gradient) {
      return gradient * (bad(trainer.iteration() + 1) ? HUGE_VAL : 1.);
    });
  }

  /// What a run of two ranks that saves in `into` tells of the last good checkpoint, if its
  /// gradients are infinite from iteration `first_bad` on; empty if it does not diverge.
  std::string told_by_run(const std::string& into, std::vector<std::string> fields,
                          int64_t first_bad, const JobStart& start = {}) const {
    fields.insert(fields.begin(), {"train.max_skipped_steps=2", "train.eval_iters=0"});
    const Config configuration = config(fields);
    std::string told;
    testing::run_ranks(2, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(configuration.checkpoint, into, state, start);
      Trainer trainer(configuration, state);
      checkpoints.load(trainer);
      spoil(trainer, state, [&](int64_t iteration) { return iteration >= first_bad; });
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      if (trainer.run(callbacks) == RunEnd::diverged && state.rank() == 0)
        told = checkpoints.describe_last_good(trainer);
    });
    return told;
  }

  /// The same of a run that fine-tunes a step in its own folder.
  std::string told_by_fine_tuning(const std::string& into, const std::string& step,
                                  std::vector<std::string> fields, int64_t first_bad,
                                  const JobStart& start = {}) const {
    fields.insert(fields.begin(),
                  {"checkpoint.load=" + into + "/" + step, "checkpoint.finetune=true"});
    return told_by_run(into, fields, first_bad, start);
  }

  testing::TemporaryFolder folder_;
  std::string path_;
};

TEST_F(RunEndTest, ALossThatIsNoNumberEndsAllRanksAfterItIsTold) {
  CollectiveLog log;
  testing::run_ranks(3,
                     [&](const ParallelState& state) {
                       Trainer trainer(config(), state);
                       TrainCallbacks callbacks;
                       std::vector<double> losses;
                       callbacks.iteration = [&](const IterationMetrics& metrics) {
                         losses.push_back(metrics.lm_loss);
                         if (metrics.iteration == 3 && state.rank() == 2)
                           at::Tensor(trainer.model().parameters()[0].detach())
                               .fill_(std::numeric_limits<float>::quiet_NaN());
                       };
                       callbacks.validation = [](const ValidationMetrics&) { FAIL(); };
                       callbacks.checkpoint = [](bool last) { EXPECT_FALSE(last); };
                       callbacks.should_stop = [&] {
                         return trainer.iteration() == 3 ? RunEnd::sigterm : RunEnd::none;
                       };
                       EXPECT_EQ(trainer.run(callbacks), RunEnd::diverged);
                       ASSERT_EQ(losses.size(), 4u);
                       EXPECT_TRUE(std::isnan(losses.back()));
                       EXPECT_EQ(trainer.divergence(), "iteration 4: the loss is not a number");
                     },
                     {.log = &log});
  int64_t losses = 0;
  for (const CollectiveRecord& call : log.of_rank(1)) {
    EXPECT_NE(call.label, "validation loss");
    if (call.label != "loss") continue;
    ++losses;
    EXPECT_EQ(call.operation, "all_reduce (sum)");
    EXPECT_EQ(call.ranks, (RankList{0, 1, 2}));
    EXPECT_EQ(call.bytes, 24);  // two sums and the ranks' wishes to stop
  }
  EXPECT_EQ(losses, 4);
}

/// This includes runs that have nothing left to train and save nothing.
TEST_F(RunEndTest, AStartRemovesWhatEarlierRunsLeft) {
  const std::filesystem::path into = folder_.path() / "left";
  for (const char* const left : {"step_4.removed.partial", "step_9.partial"}) {
    std::filesystem::create_directories(into / left);
    std::ofstream(into / left / "file") << "x";
  }
  std::filesystem::create_directories(into / "step_3");
  std::filesystem::create_directories(into / "step_6.old.partial");
  std::ofstream(into / "step_6.old.partial" / kManifestName) << "x";
  testing::run_ranks(2, [&](const ParallelState& state) {
    const RunCheckpoints checkpoints(config({}).checkpoint, into, state);
    std::set<std::string> found;
    for (const auto& entry : std::filesystem::directory_iterator(into))
      found.insert(entry.path().filename());
    if (state.rank() == 0) {
      EXPECT_EQ(found, std::set<std::string>({"lock", "step_3", "step_6"}));
    }
  });
}

TEST_F(RunEndTest, SkippedStepsCountInARowAndOverResumes) {
  const std::string into = folder_.path() / "saved";
  // Three bad steps in a row, then good ones, and only bad ones from the eighth on.
  const auto bad = [](int64_t i) { return (i >= 3 && i <= 5) || i >= 8; };
  const auto run = [&](const std::string& iterations, RunEnd end) {
    testing::run_ranks(2, [&](const ParallelState& state) {
      const Config configuration =
          config({"train.max_skipped_steps=4", "checkpoint.save_interval=1", "checkpoint.keep=1",
                  "train.eval_iters=0", "checkpoint.load=" + into,
                  "checkpoint.load_if_present=true", "train.train_iters=" + iterations});
      RunCheckpoints checkpoints(configuration.checkpoint, into, state);
      Trainer trainer(configuration, state);
      checkpoints.load(trainer);
      spoil(trainer, state, bad);
      TrainCallbacks callbacks;
      callbacks.iteration = [&](const IterationMetrics& metrics) {
        EXPECT_TRUE(std::isfinite(metrics.lm_loss));
        EXPECT_EQ(metrics.skipped, bad(metrics.iteration)) << metrics.iteration;
      };
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      EXPECT_EQ(trainer.run(callbacks), end);
      if (end != RunEnd::diverged) return;
      EXPECT_TRUE(
          trainer.divergence().starts_with("iterations 8 to 11: found 4 skipped steps in a row"))
          << trainer.divergence();
      EXPECT_EQ(checkpoints.describe_last_good(trainer),
                "the last checkpoint before that is '" + into + "/step_6'")
          << "the weights of step 7 never gave a finite gradient";
    });
  };
  using Names = std::vector<std::string>;
  run("9", RunEnd::done);
  EXPECT_EQ(complete_checkpoints(into),
            (Names{into + "/step_9", into + "/step_7", into + "/step_6"}));
  EXPECT_EQ(CheckpointReader(into).manifest().skipped_steps, 2);
  EXPECT_EQ(CheckpointReader(into + "/step_7").manifest().skipped_steps, 0);
  run("20", RunEnd::diverged);
  EXPECT_EQ(complete_checkpoints(into),
            (Names{into + "/step_10", into + "/step_7", into + "/step_6"}));
}

TEST(SkippedSteps, AreToldWithTheReasonsThatAreKnown) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  const auto step = [](bool skipped, double norm, Spike spike = Spike::none) {
    return IterationMetrics{.lm_loss = 1, .grad_norm = norm, .skipped = skipped, .spike = spike};
  };
  const std::string above =
      "whose gradient norms are above optimizer.grad_norm_skip_threshold = 0.5 (the last: 2.25)";
  SkippedSteps steps;
  EXPECT_FALSE(steps.are_only_above_threshold());
  steps.note(step(true, 3));
  steps.note(step(true, 2.25));
  EXPECT_EQ(steps.count(), 2);
  EXPECT_TRUE(steps.are_only_above_threshold());
  EXPECT_EQ(steps.reasons(0.5), above);
  steps.note(step(true, kNan));
  EXPECT_FALSE(steps.are_only_above_threshold());
  EXPECT_EQ(steps.reasons(0.5), "whose gradients are not finite or " + above);
  steps.note(step(false, 1));
  EXPECT_EQ(steps.count(), 0);
  steps.note(step(true, 9, Spike::loss));
  EXPECT_FALSE(steps.are_only_above_threshold());
  EXPECT_EQ(steps.reasons(0.5), "which are spikes");
  steps.restore(4);
  steps.note(step(true, 2.25));
  EXPECT_EQ(steps.count(), 5);
  EXPECT_FALSE(steps.are_only_above_threshold()) << "nothing is known of four of them";
  EXPECT_EQ(steps.reasons(0.5), above);
}

/// As in Megatron Core, whose training loop advances its scheduler only after an update.
TEST_F(RunEndTest, SkippedStepsDoNotAdvanceTheSchedules) {
  const std::string into = folder_.path() / "scheduled";
  const auto rates_of = [&](const std::string& iterations, const std::vector<int64_t>& bad,
                            const std::string& folder) {
    const Config configuration =
        config({"optimizer.lr_warmup_iters=4", "optimizer.lr_decay_iters=9", "train.eval_iters=0",
                "optimizer.lr_decay_style=linear", "checkpoint.load=" + folder,
                "checkpoint.load_if_present=true", "train.train_iters=" + iterations});
    std::vector<double> rates;
    testing::run_ranks(2, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(configuration.checkpoint, folder, state);
      Trainer trainer(configuration, state);
      checkpoints.load(trainer);
      spoil(trainer, state, [&](int64_t i) { return std::ranges::count(bad, i) > 0; });
      TrainCallbacks callbacks;
      callbacks.iteration = [&](const IterationMetrics& metrics) {
        if (state.rank() == 0) rates.push_back(metrics.learning_rate);
      };
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      trainer.run(callbacks);
    });
    return rates;
  };
  const std::vector<double> straight = rates_of("9", {}, folder_.path() / "straight");
  std::vector<double> rates = rates_of("4", {1, 2, 4}, into);
  const std::vector<double> resumed = rates_of("9", {1, 2, 4, 7}, into);
  rates.insert(rates.end(), resumed.begin(), resumed.end());
  ASSERT_EQ(rates.size(), 9U);
  for (const auto& [iteration, steps] : std::map<size_t, size_t>{
           {1, 0}, {2, 0}, {3, 0}, {4, 1}, {5, 1}, {6, 2}, {7, 3}, {8, 3}, {9, 4}})
    EXPECT_EQ(rates[iteration - 1], straight[steps]) << iteration;
  EXPECT_EQ(CheckpointReader(into).manifest().skipped_samples * 9,
            CheckpointReader(into).manifest().consumed_samples * 4);
}

TEST_F(RunEndTest, AThresholdThatSkipsEveryStepIsNamed) {
  Trainer trainer(config({"train.max_skipped_steps=3", "train.eval_iters=0",
                          "optimizer.grad_norm_skip_threshold=0.001", "optimizer.loss_scale=1024"}),
                  ParallelState::single_process());
  TrainCallbacks callbacks;
  double norm = 0;
  callbacks.iteration = [&](const IterationMetrics& metrics) { norm = metrics.grad_norm; };
  EXPECT_EQ(trainer.run(callbacks), RunEnd::diverged);
  EXPECT_EQ(trainer.divergence(),
            fmt::format("iterations 1 to 3: found 3 skipped steps in a row, whose gradient norms "
                        "are above optimizer.grad_norm_skip_threshold = 0.001 (the last: {:g}), "
                        "allowed: fewer than train.max_skipped_steps = 3",
                        norm));
  EXPECT_GT(norm, 0.001);
  EXPECT_EQ(trainer.last_good_iteration(), 3) << "no step has changed the weights";
  EXPECT_FALSE(trainer.loss_scale_is_in_doubt());
}

TEST_F(RunEndTest, ACheckpointOfAnotherRunIsNotNamed) {
  const std::string into = folder_.path() / "shared";
  const auto run = [&](const std::vector<std::string>& fields, int64_t first_bad) {
    return told_by_run(into, fields, first_bad);
  };
  const auto told_of = [&](const std::string& step) {
    return "the last checkpoint before that is '" + into + "/" + step + "'";
  };
  EXPECT_EQ(run({"checkpoint.save_interval=1", "train.train_iters=5"}, 100), "");
  EXPECT_EQ(run({}, 4), "") << "it has saved none";
  const std::string resumed = "checkpoint.load=" + into + "/step_3";
  EXPECT_EQ(run({resumed}, 6), told_of("step_3")) << "step 4 is of the first run";
  EXPECT_EQ(run({resumed}, 4), told_of("step_2")) << "the run from which it resumed had saved it";
  EXPECT_EQ(run({resumed, "checkpoint.finetune=true"}, 4), told_of("step_3")) << "its iteration 0";
  EXPECT_EQ(run({"checkpoint.save_interval=1"}, 4), told_of("step_2")) << "of its own";
}

TEST_F(RunEndTest, TheCheckpointThatWasFineTunedStaysUntilTheRunHasAGoodOne) {
  using Names = std::vector<std::string>;
  const std::string into = folder_.path() / "shared";
  const auto fine_tune = [&](const std::string& step, const std::vector<std::string>& fields,
                             int64_t first_bad) {
    return told_by_fine_tuning(into, step, fields, first_bad);
  };
  const std::vector<std::string> keep_one = {"checkpoint.save_interval=1", "checkpoint.keep=1",
                                             "train.train_iters=4"};
  EXPECT_EQ(told_by_run(into, {"checkpoint.save_interval=1", "train.train_iters=5"}, 100), "");
  EXPECT_EQ(fine_tune("step_5", keep_one, 2),
            "the last checkpoint before that is '" + into + "/step_5'");
  EXPECT_EQ(complete_checkpoints(into),
            (Names{into + "/step_2", into + "/step_1", into + "/step_5"}));
  EXPECT_EQ(fine_tune("step_2", {"checkpoint.save_interval=2"}, 3), "")
      << "step 2 is of this run now, and its weights gave no finite gradient";
  EXPECT_EQ(fine_tune("step_5", keep_one, 100), "");
  EXPECT_EQ(complete_checkpoints(into), (Names{into + "/step_4", into + "/step_3"}));
}

TEST_F(RunEndTest, ACheckpointOfAnotherRunDoesNotStayInPlaceOfTheOneThatWasFineTuned) {
  using Names = std::vector<std::string>;
  const std::string into = folder_.path() / "shared";
  EXPECT_EQ(told_by_run(into, {"checkpoint.save_interval=1", "train.train_iters=5"}, 100), "");
  EXPECT_EQ(told_by_fine_tuning(
                into, "step_1",
                {"checkpoint.save_interval=3", "checkpoint.keep=1", "train.train_iters=4"}, 4),
            "");
  EXPECT_EQ(complete_checkpoints(into),
            (Names{into + "/step_4", into + "/step_3", into + "/step_1"}));
}

/// It resumes from a checkpoint of its own, whose weights have given no finite gradient.
TEST_F(RunEndTest, ARestartedJobStillKeepsTheCheckpointThatItFineTuned) {
  using Names = std::vector<std::string>;
  const std::string into = folder_.path() / "shared";
  EXPECT_EQ(told_by_run(into, {}, 100), "");
  const std::vector<std::string> fields = {"checkpoint.save_interval=3", "checkpoint.keep=1",
                                           "train.max_skipped_steps=7"};
  std::vector<std::string> first = fields;
  first.emplace_back("train.train_iters=3");
  EXPECT_EQ(told_by_fine_tuning(into, "step_12", first, 2, {"job", 0}), "");
  EXPECT_EQ(complete_checkpoints(into), (Names{into + "/step_3", into + "/step_12"}));
  EXPECT_EQ(told_by_fine_tuning(into, "step_12", fields, 2, {"job", 1}),
            "the last checkpoint before that is '" + into + "/step_12'");
  EXPECT_EQ(complete_checkpoints(into), (Names{into + "/step_6", into + "/step_12"}));
}

TEST_F(RunEndTest, WithoutAValidationTheCheckpointBeforeTheLastStays) {
  using Names = std::vector<std::string>;
  for (const bool validates : {true, false}) {
    const std::string into = folder_.path() / (validates ? "with" : "without");
    testing::run_ranks(2, [&](const ParallelState& state) {
      const Config configuration =
          config({"checkpoint.save_interval=1", "checkpoint.keep=1", "train.train_iters=3",
                  validates ? "train.eval_iters=1" : "train.eval_iters=0"});
      RunCheckpoints checkpoints(configuration.checkpoint, into, state);
      Trainer trainer(configuration, state);
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      EXPECT_EQ(trainer.run(callbacks), RunEnd::done);
    });
    const Names kept =
        validates ? Names{into + "/step_3"} : Names{into + "/step_3", into + "/step_2"};
    EXPECT_EQ(complete_checkpoints(into), kept);
  }
}

TEST_F(RunEndTest, ASignalInTheLastIterationIsNoStop) {
  Trainer trainer(config({"train.train_iters=2"}), ParallelState::single_process());
  TrainCallbacks callbacks;
  std::vector<std::string> events;
  callbacks.should_stop = [&] { return trainer.iteration() == 1 ? RunEnd::sigint : RunEnd::none; };
  callbacks.validation = [&](const ValidationMetrics&) { events.emplace_back("validation"); };
  callbacks.checkpoint = [&](bool last) { events.emplace_back(last ? "last" : "checkpoint"); };
  EXPECT_EQ(trainer.run(callbacks), RunEnd::done);
  EXPECT_EQ(events, (std::vector<std::string>{"checkpoint", "validation", "last"}));
}

}  // namespace
}  // namespace lockstep
