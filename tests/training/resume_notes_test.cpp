// What a run tells the user about the checkpoint that it resumes from.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <functional>
#include <optional>

#include <ATen/ATen.h>

#include "lockstep/checkpoint/checkpoint_folder.h"
#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/elastic_layouts.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

class ResumeNotesTest : public ::testing::Test {
 protected:
  ResumeNotesTest() : into_(folder_.path() / "saved") {
    text_ = folder_.write("text", testing::synthetic_text());
  }

  Config config(std::vector<std::string> overrides = {}) const {
    overrides.insert(overrides.begin(), "data.path=" + text_);
    return parse_config(
        "model { num_layers: 1 hidden_size: 16 num_attention_heads: 2 seq_length: 16 } "
        "train { micro_batch_size: 1 train_iters: 3 eval_iters: 0 }",
        "test", overrides);
  }

  /// Three iterations of the job "ours" on two ranks, with a checkpoint after each.
  void save(std::vector<std::string> fields = {}) const {
    fields.emplace_back("checkpoint.save_interval=1");
    const Config configuration = config(fields);
    testing::run_ranks(2, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(configuration.checkpoint, into_, state, {"ours"});
      Trainer trainer(configuration, state);
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      trainer.run(callbacks);
    });
  }

  struct Told {
    std::optional<std::string> loaded;
    std::string note;
    at::Tensor state = {};
  };

  /// What rank 0 tells of a run that loads, and its weights and optimizer's state afterwards.
  Told load(int64_t ranks, const Config& config, const JobStart& start = {}) const {
    Told told;
    testing::run_ranks(ranks, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config.checkpoint, into_, state, start);
      Trainer trainer(config, state);
      const auto loaded = checkpoints.load(trainer);
      std::vector<at::Tensor> tensors;
      for (const StateTensor& tensor : trainer.state(/*with_optimizer=*/true))
        tensors.push_back(tensor.values.to(at::kDouble));
      if (state.rank() == 0) told = {loaded, checkpoints.note(), at::cat(tensors)};
    });
    return told;
  }

  /// A start of the job "tuning" on two ranks, which is lost after iteration `until`. Returns the
  /// steps in its folder.
  std::vector<std::string> tune(const Config& config, int64_t restarts,
                                std::vector<StateCopies>& copies, int64_t until) const {
    testing::run_ranks(2, [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config.checkpoint, into_, state, {"tuning", restarts},
                                 &copies[static_cast<size_t>(state.rank())]);
      Trainer trainer(config, state);
      checkpoints.load(trainer);
      while (trainer.iteration() < until) {
        trainer.train_step();
        checkpoints.after_iteration(trainer, /*last=*/false);
      }
    });
    std::vector<std::string> steps;
    for (const std::string& path : complete_checkpoints(into_))
      steps.push_back(std::filesystem::path(path).filename());
    return steps;
  }

  /// What a run with these fields tells of resuming from the newest checkpoint.
  std::string note(int64_t ranks, std::vector<std::string> fields) const {
    fields.insert(fields.begin(), "checkpoint.load=" + into_);
    return load(ranks, config(fields)).note;
  }

  testing::TemporaryFolder folder_;
  std::string into_, text_;
};

TEST_F(ResumeNotesTest, AnotherBatchMovesTheSchedules) {
  save();
  const std::string step = "'" + into_ + "/step_3'";
  EXPECT_EQ(note(1, {}),
            "train.global_batch_size: found 1, in " + step +
                ": 2; the schedules of the learning rate and the weight decay count samples, so "
                "they continue as after 6 iterations with a batch of 1; to keep the batch, use "
                "--set train.global_batch_size=2");
  EXPECT_EQ(note(1, {"train.micro_batch_size=3"}),
            "train.global_batch_size: found 3, in " + step +
                ": 2; the schedules of the learning rate and the weight decay count samples, so "
                "they continue as after 2 iterations with a batch of 3")
      << "this layout cannot keep the batch";
  EXPECT_EQ(note(2, {}), "");
  EXPECT_EQ(note(1, {"train.micro_batch_size=2"}), "");
  EXPECT_EQ(note(1, {"train.global_batch_size=2"}), "");
  const std::string constant = "optimizer.lr_decay_style=constant";
  EXPECT_EQ(note(1, {"train.global_batch_size=2", "train.rampup_batch_size=1 1 100", constant}),
            "");
  EXPECT_EQ(note(1, {"train.step_batch_size_schedule=0:1 100:2", constant}), "");
  EXPECT_EQ(note(1, {"checkpoint.finetune=true"}), "");
}

TEST_F(ResumeNotesTest, AnotherBatchIsToldByTheFieldThatTheRunUses) {
  const std::string steps = "train.step_batch_size_schedule=";
  const std::string constant = "optimizer.lr_decay_style=constant";  // no note on the decay
  const auto told = [this](const std::string& field, int64_t found, int64_t saved, int64_t after,
                           const std::string& advice = "") {
    return fmt::format(
        "train.{}: found {}, in '{}/step_3': {}; the schedules of the learning rate and the weight "
        "decay count samples, so they continue as after {} iterations with a batch of {}{}",
        field, found, into_, saved, after, found, advice);
  };
  save();
  EXPECT_EQ(note(1, {steps + "0:1 100:4", constant}), told("step_batch_size_schedule", 4, 2, 1))
      << "which is not allowed beside train.global_batch_size";
  EXPECT_EQ(note(1, {"train.global_batch_size=8", "train.rampup_batch_size=4 4 100", constant}),
            told("global_batch_size", 8, 2, 0))
      << "the batch cannot grow from 4 to 2";
  save({steps + "0:2 4:4"});
  EXPECT_EQ(note(1, {"train.global_batch_size=8"}), told("global_batch_size", 8, 4, 1));
  EXPECT_EQ(note(1, {steps + "0:1"}),
            told("step_batch_size_schedule", 1, 4, 8,
                 "; to keep the batch, use --set train.step_batch_size_schedule='0:2 4:4'"));
  EXPECT_EQ(note(1, {steps + "0:8", "train.micro_batch_size=4"}),
            told("step_batch_size_schedule", 8, 4, 1))
      << "the first step is no multiple of 4";
}

// Versions that resolved the field for such batches, too, have saved a number.
TEST_F(ResumeNotesTest, ADecayThatNowEndsWithTheRunIsTold) {
  const std::string steps = "train.step_batch_size_schedule=0:2 4:4";
  save({steps, "optimizer.lr_decay_iters=3"});
  const auto told = [this](const std::string& what, const std::string& advice) {
    return fmt::format(
        "optimizer.lr_decay_iters: found unset, in '{}/step_3': 3; {} with the samples of the "
        "run{}",
        into_, what, advice);
  };
  const std::string grows = "optimizer.weight_decay_incr_style=linear";
  const std::string keep = "; to keep the decay, use --set optimizer.lr_decay_iters=3";
  EXPECT_EQ(note(1, {steps}), told("the decay ends", keep));
  EXPECT_EQ(note(1, {steps, grows}), told("the decay and the weight decay's schedule end", keep));
  const std::string constant = "optimizer.lr_decay_style=constant";
  EXPECT_EQ(note(1, {steps, constant, grows}), told("the weight decay's schedule ends", ""));
  EXPECT_EQ(note(1, {steps, constant}), "");
  EXPECT_EQ(note(1, {steps, "optimizer.lr_decay_iters=3"}), "");
  EXPECT_EQ(note(1, {steps, "checkpoint.finetune=true"}), "");
  save({steps});
  EXPECT_EQ(note(1, {steps}), "");
}

// It would have trained 3 iterations of 2 samples; with batches that grow they are 3 samples.
TEST_F(ResumeNotesTest, ADecayThatBatchesOfChangingSizeMoveIsTold) {
  save();
  const std::string ramp_up = "train.rampup_batch_size=1 1 100";
  EXPECT_EQ(note(1, {"train.global_batch_size=2", ramp_up}),
            "optimizer.lr_decay_iters: found unset, in '" + into_ +
                "/step_3': 3; the decay ends with the samples of the run; to keep the decay, use "
                "--set optimizer.lr_decay_iters=3");
  EXPECT_EQ(note(1, {"train.global_batch_size=2", ramp_up, "optimizer.lr_decay_iters=3"}), "");
}

TEST_F(ResumeNotesTest, AnElasticRunKeepsItsBatch) {
  save();
  Config fewer = config({"checkpoint.load=" + into_});
  keep_global_batch(fewer, 1, into_, {});
  const Told told = load(1, fewer);
  EXPECT_EQ(told.loaded, into_ + "/step_3");
  EXPECT_EQ(told.note, "");
}

TEST_F(ResumeNotesTest, ARestartNamesTheCheckpointsThatItCannotRead) {
  save();
  const std::string damaged = "not a manifest\n";
  folder_.write("saved/step_3/manifest.textproto", damaged);
  const Told older = load(2, config(), {"ours", 1});
  EXPECT_EQ(older.loaded, into_ + "/step_2");
  EXPECT_TRUE(older.note.starts_with("'" + into_ + "/step_3/manifest.textproto': ")) << older.note;
  EXPECT_TRUE(older.note.ends_with("; the run resumes from an older checkpoint")) << older.note;
  folder_.write("saved/step_2/manifest.textproto", damaged);
  folder_.write("saved/step_1/manifest.textproto", damaged);
  const Told none = load(2, config(), {"ours", 1});
  EXPECT_FALSE(none.loaded);
  for (const char* const step : {"/step_3/", "/step_2/", "/step_1/"})
    EXPECT_NE(none.note.find(into_ + step), std::string::npos) << none.note;
  EXPECT_TRUE(none.note.ends_with("; the run does not resume from it")) << none.note;
}

/// Rank 0 has read a part of the newest one before it finds the damage in the other rank's shard.
TEST_F(ResumeNotesTest, ARestartPassesOverCheckpointsWhoseShardsAreDamaged) {
  const std::string shard = "/rank_00001.safetensors";
  const auto halve = [](std::string& bytes) { bytes.resize(bytes.size() / 2); };
  const auto flip = [](std::string& bytes) { bytes.back() = static_cast<char>(bytes.back() ^ 1); };
  for (const std::function<void(std::string&)>& damage :
       std::vector<std::function<void(std::string&)>>{halve, flip}) {
    save();
    const auto spoil = [&](const std::string& step) {
      std::string bytes = folder_.read("saved/" + step + shard);
      damage(bytes);
      folder_.write("saved/" + step + shard, bytes);
    };
    const Told wanted = load(2, config({"checkpoint.load=" + into_ + "/step_1"}));
    spoil("step_3");
    spoil("step_2");
    const Told found = load(2, config(), {"ours", 1});
    EXPECT_EQ(found.loaded, into_ + "/step_1");
    EXPECT_TRUE(at::equal(found.state, wanted.state));
    for (const char* const step : {"/step_3", "/step_2"})
      EXPECT_NE(found.note.find("'" + into_ + step + shard + "'"), std::string::npos) << found.note;
    EXPECT_TRUE(found.note.ends_with("; the run resumes from an older checkpoint")) << found.note;
    spoil("step_1");
    EXPECT_TRUE(testing::throws_with<FileError>(
        [&] {
          load(2, config(), {"ours", 1});
        },
        "/step_1" + shard));
    std::filesystem::remove_all(into_);
  }
}

/// Until the job has one of its own that is known to be good, however often it is restarted.
TEST_F(ResumeNotesTest, AJobThatResumesFromMemoryKeepsTheCheckpointThatItFineTuned) {
  using Names = std::vector<std::string>;
  save({"train.train_iters=8"});
  const Config tuned =
      config({"train.train_iters=20", "train.global_batch_size=2", "train.elastic=dp",
              "checkpoint.in_memory_replicas=1", "checkpoint.load=" + into_,
              "checkpoint.finetune=true", "checkpoint.keep=1", "checkpoint.save_interval=5"});
  std::vector<StateCopies> copies(2);
  EXPECT_EQ(tune(tuned, 0, copies, 4).size(), 8U);
  EXPECT_EQ(tune(tuned, 1, copies, 5), (Names{"step_5", "step_8"}));
  EXPECT_EQ(tune(tuned, 2, copies, 10), (Names{"step_10", "step_5"}));
}

}  // namespace
}  // namespace lockstep
