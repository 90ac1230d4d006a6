#pragma once

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <limits>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/trainer.h"

/// Runs over a text in which some samples are of another kind, so that their losses are spikes.
namespace lockstep::testing {

using SpikeFields = std::vector<std::string>;

inline constexpr int64_t kWindow = 6, kLength = 16, kBatch = 6;
inline constexpr double kZScore = 5;

struct Told {
  int64_t iteration = 0;
  double loss = 0, norm = 0;
  Spike spike = Spike::none;
  bool operator==(const Told&) const = default;
};

struct SpikeOutcome {
  std::vector<Told> told;
  RunEnd end = RunEnd::none;
  std::string divergence;
};

/// Events during a run.
struct SpikeRunEvents {
  JobStart start = {};
  /// Reported iterations after which a signal stops the run, or all of its ranks are killed.
  size_t stopped_after = std::numeric_limits<size_t>::max();
  size_t killed_after = std::numeric_limits<size_t>::max();
  /// Called on rank 0 while no save is in progress: with each iteration before it is saved, and
  /// before the run goes back.
  std::function<void(const IterationMetrics&)> iteration = {};
  std::function<void()> going_back = {};
  std::vector<StateCopies>* copies = nullptr;  ///< one for each rank
};

class SpikeRuns : public ::testing::Test {
 protected:
  SpikeRuns() {
    calm_ = folder_.write("calm", text(240, {}));
    wild_ = folder_.write("wild", text(240, {31, 77, 101, 154, 203}));
    base_ = folder_.path() / "base";
    train(config(calm_, {"train.train_iters=30"}), 1, base_);
  }

  /// `samples` samples that count up, except those in `strange`, which have other bytes.
  static std::string text(int64_t samples, const std::vector<int64_t>& strange) {
    std::string all;
    for (int64_t i = 0; i <= samples * kLength; ++i) all += static_cast<char>('a' + i % 7);
    for (const int64_t sample : strange)
      for (int64_t i = 1; i <= kLength; ++i)
        all[static_cast<size_t>(sample * kLength + i)] =
            static_cast<char>(128 + (i * i * 7 + sample) % 100);
    return all;
  }

  Config config(const std::string& path, const SpikeFields& more) const {
    SpikeFields all = {"data.path=" + path, "train.precision=fp64", "data.split=1,0"};
    all.insert(all.end(), more.begin(), more.end());
    if (std::any_of(more.begin(), more.end(),
                    [](const std::string& field) { return field.starts_with("train.on_spike"); }))
      all.insert(all.end(), {"train.spike_window=6", "train.spike_zscore=5"});
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 2 ffn_hidden_size: 16 "
        "seq_length: 16 vocab_size: 256 init_method_std: 0.1 } "
        "train { global_batch_size: 6 micro_batch_size: 1 eval_iters: 0 train_iters: 40 } "
        "optimizer { lr: 0.03 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Starts from the model that has learned the calm text.
  Config wild(const SpikeFields& more) const {
    SpikeFields all = {"checkpoint.load=" + base_, "checkpoint.finetune=true"};
    all.insert(all.end(), more.begin(), more.end());
    return config(wild_, all);
  }

  /// Trains as `lockstep train` does. Saves into `folder`, or nowhere.
  static SpikeOutcome train(const Config& config, int64_t world, const std::string& folder,
                            const SpikeRunEvents& events = {}) {
    RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    SpikeOutcome outcome;
    std::mutex mutex;
    run_ranks(
        world,
        [&](const ParallelState& state) {
          SpikeOutcome own = train_rank(config, state, folder, events);
          const std::lock_guard<std::mutex> lock(mutex);
          if (!outcome.told.empty()) {
            EXPECT_EQ(outcome.told, own.told) << state.rank();
          }
          outcome = std::move(own);
        },
        options);
    return outcome;
  }

  std::string at(const std::string& name) const { return folder_.path() / name; }

  TemporaryFolder folder_;
  std::string calm_, wild_, base_;

 private:
  struct Killed {};

  static SpikeOutcome train_rank(const Config& config, const ParallelState& state,
                                 const std::string& folder, const SpikeRunEvents& events) {
    const auto rank = static_cast<size_t>(state.rank());
    RunCheckpoints checkpoints(config.checkpoint, folder, state, events.start,
                               events.copies ? &events.copies->at(rank) : nullptr);
    Trainer trainer(config, state);
    checkpoints.load(trainer);
    SpikeOutcome own;
    TrainCallbacks callbacks;
    callbacks.should_stop = [&] {
      return own.told.size() + 1 == events.stopped_after ? RunEnd::sigterm : RunEnd::none;
    };
    callbacks.iteration = [&](const IterationMetrics& m) {
      own.told.push_back({m.iteration, m.lm_loss, m.grad_norm, m.spike});
      EXPECT_EQ(m.skipped, m.spike != Spike::none);
      if (events.iteration) checkpoints.finish();
      if (events.iteration && state.rank() == 0) events.iteration(m);
      if (own.told.size() == events.killed_after) throw Killed();
    };
    callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
    callbacks.go_back = [&] {
      checkpoints.finish();
      if (events.going_back && state.rank() == 0) events.going_back();
      return !checkpoints.go_back(trainer).empty();
    };
    try {
      own.end = trainer.run(callbacks);
    } catch (const Killed&) {
      return own;
    }
    own.divergence = own.end == RunEnd::diverged ? trainer.divergence() : "";
    checkpoints.finish();
    return own;
  }
};

}  // namespace lockstep::testing
