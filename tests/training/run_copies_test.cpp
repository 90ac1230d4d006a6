#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <set>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/manifest.h"
#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/run_checkpoints.h"

namespace lockstep {
namespace {

using Fields = std::vector<std::string>;

constexpr int64_t kCopiedAt = 4, kStepsAfter = 6;

struct RunLayout {
  int64_t ranks;
  Fields fields;
};

class RunCopiesTest : public ::testing::Test {
 protected:
  RunCopiesTest() { text_ = folder_.write("text", testing::synthetic_text()); }

  Config config(Fields fields) const {
    fields.insert(fields.begin(), {"data.path=" + text_, "train.precision=fp64", "train.elastic=dp",
                                   "checkpoint.in_memory_replicas=1"});
    return parse_config(
        "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 num_query_groups: 2 "
        "ffn_hidden_size: 24 seq_length: 16 vocab_size: 257 make_vocab_size_divisible_by: 4 } "
        "optimizer { lr: 0.01 lr_warmup_iters: 2 weight_decay: 0.1 clip_grad: 0.5 "
        "lr_decay_style: \"cosine\" } train { global_batch_size: 12 micro_batch_size: 1 "
        "train_iters: 20 eval_iters: 0 }",
        "test", fields);
  }

  using Body = std::function<void(Trainer&, RunCheckpoints&, const ParallelState&)>;

  /// Runs the ranks of a round, each with its copies.
  void run(const Config& config, std::vector<StateCopies>& copies, int64_t round, const Body& body,
           testing::CollectiveLog* log = nullptr) const {
    testing::run_ranks(static_cast<int64_t>(copies.size()),
                       [&](const ParallelState& state) {
                         RunCheckpoints checkpoints(config.checkpoint, "", state, {"job", round},
                                                    &copies[static_cast<size_t>(state.rank())]);
                         Trainer trainer(config, state, !checkpoints.will_load());
                         body(trainer, checkpoints, state);
                       },
                       {.sizes = parallel_options(config, c10::kCPU).sizes, .log = log});
  }

  /// Loss, gradient norm, learning rate, samples and loss scale of further iterations.
  static std::vector<double> steps(Trainer& trainer, int64_t count) {
    std::vector<double> values;
    for (int64_t i = 0; i < count; ++i) {
      const IterationMetrics metrics = trainer.train_step();
      const double norm = std::isfinite(metrics.grad_norm) ? metrics.grad_norm : -1;
      values.insert(values.end(),
                    {metrics.lm_loss, norm, metrics.learning_rate,
                     static_cast<double>(metrics.consumed_samples), metrics.loss_scale});
    }
    return values;
  }

  /// Trains on `first` with copies, then loses ranks. Returns the curve after the last copy.
  std::vector<double> train_and_lose(const RunLayout& first, const Fields& more,
                                     std::vector<StateCopies>& copies,
                                     const std::set<int64_t>& lost, bool replaced) const {
    std::vector<double> curve;
    std::vector<StateCopies> made(static_cast<size_t>(first.ranks));
    run(config(joined(first.fields, more)), made, 0,
        [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
          for (int64_t i = 1; i <= kCopiedAt; ++i) {
            steps(trainer, 1);
            EXPECT_EQ(checkpoints.after_iteration(trainer, /*last=*/false), "");
          }
          const std::vector<double> mine = steps(trainer, kStepsAfter);
          if (state.rank() == 0) curve = mine;
        });
    for (size_t rank = 0; rank < made.size(); ++rank)
      if (!lost.contains(static_cast<int64_t>(rank)))
        copies.push_back(std::move(made[rank]));
      else if (replaced)
        copies.emplace_back();
    return curve;
  }

  /// The curve of a round that resumes from the copies.
  std::vector<double> resume(const RunLayout& second, const Fields& more,
                             std::vector<StateCopies>& copies) const {
    std::vector<double> curve;
    copies.resize(static_cast<size_t>(second.ranks));
    run(config(joined(second.fields, more)), copies, 1,
        [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
          EXPECT_EQ(checkpoints.load(trainer), RunCheckpoints::kInMemory) << checkpoints.note();
          EXPECT_EQ(trainer.iteration(), kCopiedAt);
          const std::vector<double> mine = steps(trainer, kStepsAfter);
          if (state.rank() == 0) curve = mine;
        });
    return curve;
  }

  static Fields joined(Fields first, const Fields& second) {
    first.insert(first.end(), second.begin(), second.end());
    return first;
  }

  static void expect_close(const std::vector<double>& found, const std::vector<double>& wanted) {
    ASSERT_EQ(found.size(), wanted.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], wanted[i], 1e-11 * std::abs(wanted[i])) << i;
  }

  std::string saved_base() const;

  testing::TemporaryFolder folder_;
  std::string text_;
};

const RunLayout kDp3 = {3, {}}, kDp2 = {2, {}};
const RunLayout kShardedState = {2, {"ddp.use_distributed_optimizer=true"}};
const RunLayout kZero3 = {2,
                          {"ddp.data_parallel_sharding_strategy=optim_grads_params",
                           "ddp.use_distributed_optimizer=true"}};
const RunLayout kTp2Dp2 = {4, {"parallel.tensor_model_parallel_size=2"}};
const RunLayout kPp2Dp2 = {4, {"parallel.pipeline_model_parallel_size=2"}};
const RunLayout kTp2 = {2, {"parallel.tensor_model_parallel_size=2"}};
const RunLayout kPp2 = {2, {"parallel.pipeline_model_parallel_size=2"}};

TEST_F(RunCopiesTest, ReplacedRanksGoOnBitForBit) {
  const Fields fp16 = {"train.precision=fp16", "optimizer.initial_loss_scale=65536"};
  const Fields fp8 = {"train.precision=bf16", "train.fp8=hybrid", "train.fp8_amax_history_len=3",
                      "model.hidden_size=64", "model.ffn_hidden_size=64"};
  const Fields adapters = {"lora.rank=2"}, none = {};
  const Fields dropout = {"model.hidden_dropout=0.1", "model.attention_dropout=0.1"};
  const std::vector<std::pair<RunLayout, Fields>> runs = {
      {kDp3, dropout}, {kShardedState, none}, {kZero3, none},       {kTp2Dp2, none},
      {kPp2Dp2, none}, {kDp2, fp16},          {kShardedState, fp8}, {kDp2, adapters}};
  int64_t number = 0;
  for (const auto& [layout, more] : runs) {
    const int64_t lost = number++ % layout.ranks;
    std::vector<StateCopies> copies;
    const auto wanted = train_and_lose(layout, more, copies, {lost}, /*replaced=*/true);
    EXPECT_EQ(resume(layout, more, copies), wanted)
        << lost << " of "
        << fmt::format("{} {}", fmt::join(layout.fields, " "), fmt::join(more, " "));
  }
}

TEST_F(RunCopiesTest, FewerRanksGoOnWithTheSameLosses) {
  const RunLayout one = {1, {}};
  const std::vector<std::tuple<RunLayout, RunLayout, std::set<int64_t>>> runs = {
      {kDp3, kDp2, {1}},       {kShardedState, one, {0}}, {kTp2Dp2, kTp2, {1, 3}},
      {kPp2Dp2, kPp2, {1, 3}}, {kZero3, one, {1}},        {kTp2Dp2, kTp2, {0, 2}}};
  for (const auto& [first, second, lost] : runs) {
    std::vector<StateCopies> copies;
    const auto wanted = train_and_lose(first, {}, copies, lost, /*replaced=*/false);
    expect_close(resume(second, {}, copies), wanted);
  }
}

/// No copy is made between the intervals, and a run that resumes makes one at once.
TEST_F(RunCopiesTest, CopiesAreMadeInTheirInterval) {
  const Config every_third = config({"checkpoint.in_memory_interval=3"});
  std::vector<StateCopies> copies(2);
  testing::CollectiveLog log;
  std::vector<int64_t> made;
  const auto count = [&log] {
    int64_t number = 0;
    for (const CollectiveRecord& call : log.of_rank(0))
      number += call.label == "a part of the state in memory" && call.operation == "all_to_all";
    return number;
  };
  run(
      every_third, copies, 0,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
        EXPECT_FALSE(checkpoints.load(trainer));
        for (int64_t i = 1; i <= 7; ++i) {
          steps(trainer, 1);
          EXPECT_EQ(checkpoints.is_due(i), i % 3 == 0);
          checkpoints.after_iteration(trainer, /*last=*/i == 7);
          if (state.rank() == 0) made.push_back(count());
        }
      },
      &log);
  EXPECT_EQ(made, (std::vector<int64_t>{0, 0, 1, 1, 1, 2, 2}));
  copies[1].clear();
  testing::CollectiveLog second;
  run(
      every_third, copies, 1,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
        EXPECT_TRUE(checkpoints.load(trainer));
        EXPECT_EQ(trainer.iteration(), 6);
        const auto held = copies[static_cast<size_t>(state.rank())].held();
        ASSERT_EQ(held.size(), state.rank() == 0 ? 2u : 1u);
        EXPECT_EQ(held.back().id, (CopyId{1, 0}));
        EXPECT_EQ(held.back().parts, (std::vector<int64_t>{0, 1}));
      },
      &second);
  EXPECT_EQ(second.of_rank(1).size(), second.of_rank(0).size());
}

TEST_F(RunCopiesTest, ARunWithoutThemCommunicatesNothingForThem) {
  std::vector<StateCopies> copies(2);
  testing::CollectiveLog log;
  run(
      config({"checkpoint.in_memory_replicas=0"}), copies, 0,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState&) {
        steps(trainer, 2);
        EXPECT_FALSE(checkpoints.is_due(2));
        EXPECT_EQ(checkpoints.after_iteration(trainer, /*last=*/false), "");
      },
      &log);
  for (const CollectiveRecord& call : log.of_rank(0))
    EXPECT_EQ(call.label.find("memory"), std::string::npos) << call.label;
  EXPECT_EQ(copies[0].bytes(), 0);
}

TEST_F(RunCopiesTest, WhatIsLostIsToldAndTheRunBeginsAgain) {
  std::vector<StateCopies> copies;
  train_and_lose(kDp3, {}, copies, {0, 1}, /*replaced=*/true);
  run(config({}), copies, 1,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
        EXPECT_FALSE(checkpoints.load(trainer));
        EXPECT_EQ(trainer.iteration(), 0);
        EXPECT_EQ(
            checkpoints.note(),
            "the copy of iteration 3 is incomplete: no surviving rank has the part of rank 0; "
            "the run does not resume from the ranks' memory");
        EXPECT_EQ(copies[static_cast<size_t>(state.rank())].bytes(), 0);
      });
  std::vector<StateCopies> one(1);
  run(config({}), one, 1, [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState&) {
    EXPECT_FALSE(checkpoints.load(trainer));
    EXPECT_EQ(checkpoints.note(), "checkpoint.in_memory_replicas: found 1, other ranks left: 0");
    EXPECT_FALSE(checkpoints.is_due(1));
  });
}

/// Its processes are new, so that none could have kept a copy.
TEST_F(RunCopiesTest, ARequeuedJobLooksForNoCopies) {
  std::vector<StateCopies> copies(2);
  const CheckpointConfig mine = config({}).checkpoint;
  testing::run_ranks(2, [&](const ParallelState& state) {
    RunCheckpoints checkpoints(mine, "", state, {.job_id = "job", .restarts = 1, .requeues = 1},
                               &copies[static_cast<size_t>(state.rank())]);
    EXPECT_FALSE(checkpoints.will_load());
    EXPECT_EQ(checkpoints.note(), "");
  });
}

/// A bit that flips in memory is found before it is copied.
TEST_F(RunCopiesTest, RanksCompareWhatTheyHoldBeforeTheyCopyIt) {
  std::vector<StateCopies> copies(2);
  testing::CollectiveLog log;
  run(
      config({"checkpoint.in_memory_interval=2", "train.replica_check_interval=100",
              "train.train_iters=7"}),
      copies, 0,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState&) {
        TrainCallbacks callbacks;
        callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
        callbacks.checkpoint_is_due = [&](int64_t i) { return checkpoints.is_due(i); };
        trainer.run(callbacks);
      },
      &log);
  std::string order;  // c: compares, k: keeps a copy
  for (const CollectiveRecord& call : log.of_rank(0)) {
    if (call.label == "fingerprints of copies") order += 'c';
    if (call.label == "a part of the state in memory" && call.operation == "all_to_all")
      order += 'k';
  }
  EXPECT_EQ(order, "ckckckc");  // the last comparison is at the end
}

/// metrics.jsonl no longer has the lines of iterations that a run abandons when it goes back.
TEST_F(RunCopiesTest, ARunThatGoesBackLeavesNoCopies) {
  const Config config = this->config({"checkpoint.save_interval=2"});
  std::vector<StateCopies> copies(2);
  testing::run_ranks(2, [&](const ParallelState& state) {
    StateCopies& mine = copies[static_cast<size_t>(state.rank())];
    RunCheckpoints checkpoints(config.checkpoint, folder_.path() / "saved", state, {"job", 0},
                               &mine);
    Trainer trainer(config, state);
    for (int64_t i = 0; i < 3; ++i) {
      steps(trainer, 1);
      checkpoints.after_iteration(trainer, /*last=*/false);
    }
    EXPECT_EQ(mine.held().back().iteration, 3);
    EXPECT_TRUE(checkpoints.go_back(trainer).ends_with("step_2"));
    EXPECT_EQ(trainer.iteration(), 2);
    EXPECT_TRUE(mine.held().empty());
  });
}

/// Saves a model without adapters; returns where.
std::string RunCopiesTest::saved_base() const {
  const std::string folder = folder_.path() / "base";
  const Config base = config({"checkpoint.in_memory_replicas=0"});
  testing::run_ranks(1, [&](const ParallelState& state) {
    RunCheckpoints checkpoints(base.checkpoint, folder, state);
    Trainer trainer(base, state);
    steps(trainer, 1);
    checkpoints.after_iteration(trainer, /*last=*/true);
  });
  return folder;
}

/// That would throw away all the training of the adapters.
TEST_F(RunCopiesTest, AdaptersDoNotGoBackToTheModelWithoutThem) {
  const Config config = this->config({"lora.rank=2", "checkpoint.load=" + saved_base()});
  std::vector<StateCopies> copies(2);
  for (const int64_t round : {0, 1})
    run(config, copies, round,
        [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState&) {
          EXPECT_EQ(checkpoints.load(trainer) == RunCheckpoints::kInMemory, round == 1);
          steps(trainer, 2);
          checkpoints.after_iteration(trainer, /*last=*/false);
          const int64_t iteration = trainer.iteration();
          if (round == 0) return;
          EXPECT_EQ(checkpoints.go_back(trainer), "");
          EXPECT_EQ(trainer.iteration(), iteration);
        });
}

TEST_F(RunCopiesTest, ADamagedCheckpointOnDiskDoesNotEndARunThatResumesFromMemory) {
  const std::string base = saved_base();
  const Config config = this->config({"checkpoint.load=" + base});
  std::vector<StateCopies> copies(2);
  run(config, copies, 0, [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState&) {
    checkpoints.load(trainer);
    steps(trainer, 1);
    checkpoints.after_iteration(trainer, /*last=*/false);
  });
  std::ofstream(find_checkpoint(base) + "/" + kManifestName) << "no manifest";
  run(config, copies, 1,
      [&](Trainer& trainer, RunCheckpoints& checkpoints, const ParallelState& state) {
        EXPECT_EQ(checkpoints.load(trainer), RunCheckpoints::kInMemory);
        EXPECT_EQ(checkpoints.note().find("; the run resumes from the ranks' memory and has no "
                                          "checkpoint until it saves one") != std::string::npos,
                  state.rank() == 0)
            << checkpoints.note();
        EXPECT_EQ(checkpoints.path(), "");
        EXPECT_EQ(checkpoints.describe_last_good(trainer), "");
        EXPECT_EQ(checkpoints.go_back(trainer), "");
      });
}

TEST_F(RunCopiesTest, TheNewerOfMemoryAndDiskIsTaken) {
  const Config config =
      this->config({"checkpoint.save_interval=2", "checkpoint.in_memory_interval=3"});
  std::vector<StateCopies> copies(2);
  const auto round = [&](int64_t number, int64_t first, int64_t last) {
    std::string loaded;
    const std::string folder = folder_.path() / "both";
    testing::run_ranks(2, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config.checkpoint, folder, state, {"job", number},
                                 &copies[static_cast<size_t>(state.rank())]);
      Trainer trainer(config, state);
      const auto from = checkpoints.load(trainer);
      if (state.rank() == 0) loaded = from.value_or("");
      EXPECT_EQ(trainer.iteration(), first);
      for (int64_t i = first; i < last; ++i) {
        steps(trainer, 1);
        checkpoints.after_iteration(trainer, /*last=*/false);
      }
    });
    return loaded;
  };
  EXPECT_EQ(round(0, 0, 3), "");
  EXPECT_EQ(round(1, 3, 4), RunCheckpoints::kInMemory);
  EXPECT_TRUE(round(2, 4, 5).ends_with("step_4"));
  EXPECT_EQ(copies[0].bytes(), 0);
  EXPECT_TRUE(round(3, 4, 6).ends_with("step_4"));
  EXPECT_EQ(round(4, 6, 6), RunCheckpoints::kInMemory);
}

TEST_F(RunCopiesTest, CopiesNeedRanksThatStay) {
  EXPECT_TRUE(testing::throws_with<ConfigError>(
      [&] { config({"train.elastic=none"}); },
      "checkpoint.in_memory_replicas: found 1, and train.elastic = none; allowed: 0, or dp"));
}

}  // namespace
}  // namespace lockstep
