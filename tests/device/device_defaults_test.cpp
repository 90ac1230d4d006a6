// How a run on a device differs from one on the CPU if its configuration says nothing: the rows of
// the vocabulary's tables.

#include <gtest/gtest.h>

#include <mutex>
#include <string>
#include <vector>

#include "lockstep/checkpoint/saved_model.h"
#include "lockstep/core/config_io.h"
#include "lockstep/core/parameters.h"
#include "lockstep/tests/support/device/device_ranks.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/generate.h"
#include "lockstep/training/run_checkpoints.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/trainer.h"

namespace lockstep::testing {
namespace {

enum class Place { cpu, device };

/// The results of a run, from its rank 0.
struct VocabularyRun {
  std::vector<double> curve;  ///< loss and norm of each step
  std::vector<int64_t> rows;  ///< of the vocabulary's tables on a rank
  bool operator==(const VocabularyRun&) const = default;
};

class DeviceDefaults : public ::testing::TestWithParam<int64_t> {
 protected:
  static void SetUpTestSuite() { use_lagging_device(); }

  DeviceDefaults() { text_ = folder_.write("text", synthetic_text()); }

  /// 300 token ids on GetParam() ranks of tp.
  Config config(int64_t iterations, const std::vector<std::string>& more = {}) const {
    std::vector<std::string> all = {
        "data.path=" + text_, "train.train_iters=" + std::to_string(iterations),
        "parallel.tensor_model_parallel_size=" + std::to_string(GetParam())};
    all.insert(all.end(), more.begin(), more.end());
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 seq_length: 16 "
        "vocab_size: 300 untie_embeddings_and_output_weights: true } "
        "train { global_batch_size: 4 micro_batch_size: 2 eval_iters: 0 precision: \"fp64\" } "
        "checkpoint { load_if_present: true } "
        "optimizer { lr: 0.01 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Resumes from the checkpoint in `folder`, and saves there.
  static VocabularyRun train_in(const std::string& folder, Config config, Place place) {
    config.checkpoint.load = folder;
    VocabularyRun run;
    const auto body = [&](const ParallelState& state) {
      RunCheckpoints checkpoints(config.checkpoint, folder, state);
      Trainer trainer(config, state);
      checkpoints.load(trainer);
      TrainCallbacks callbacks;
      callbacks.checkpoint = [&](bool last) { checkpoints.after_iteration(trainer, last); };
      if (state.rank() == 0)
        callbacks.iteration = [&](const IterationMetrics& metrics) {
          run.curve.push_back(metrics.lm_loss);
          run.curve.push_back(metrics.grad_norm);
        };
      trainer.run(callbacks);
      if (state.rank() != 0) return;
      for (const NamedParameter& param : collect_parameters(trainer.model()))
        if (param.description.unpadded_rows) run.rows.push_back(param.tensor.size(0));
    };
    const ParallelSizes sizes = parallel_options(config, c10::kCPU).sizes;
    if (place == Place::cpu)
      run_ranks(GetParam(), body, {.sizes = sizes});
    else
      run_device_ranks(GetParam(), body, {.sizes = sizes});
    return run;
  }

  /// On one rank of tp, the bits match. On several, each holds another part of the vocabulary when
  /// it is padded, so sums are rounded differently.
  static void expect_same(const std::vector<double>& found, const std::vector<double>& expected) {
    ASSERT_EQ(found.size(), expected.size());
    for (size_t i = 0; i < found.size(); ++i)
      EXPECT_NEAR(found[i], expected[i], GetParam() == 1 ? 0 : 1e-13 * expected[i]) << i;
  }

  TemporaryFolder folder_;
  std::string text_;
};

TEST_P(DeviceDefaults, TheVocabularyIsPaddedTo128OnADeviceAndTheLossesAreTheCpus) {
  const TemporaryFolder on_cpu, on_device;
  const VocabularyRun cpu = train_in(on_cpu.path(), config(4), Place::cpu);
  const VocabularyRun device = train_in(on_device.path(), config(4), Place::device);
  const int64_t padded = GetParam() == 1 ? 384 : 256;  // the total is a multiple of 128 * tp
  EXPECT_EQ(cpu.rows, std::vector<int64_t>(2, 300 / GetParam()));
  EXPECT_EQ(device.rows, std::vector<int64_t>(2, padded));
  expect_same(device.curve, cpu.curve);
}

TEST_P(DeviceDefaults, WhatIsSetHoldsOnBoth) {
  const std::vector<std::string> set = {"model.make_vocab_size_divisible_by=32"};
  const std::vector<int64_t> rows(2, 320 / GetParam());
  for (const Place place : {Place::cpu, Place::device}) {
    const TemporaryFolder saved;
    EXPECT_EQ(train_in(saved.path(), config(1, set), place).rows, rows);
  }
}

TEST_P(DeviceDefaults, ACheckpointGoesFromTheCpuToADeviceAndBack) {
  const TemporaryFolder moved, stayed;
  const VocabularyRun expected = train_in(stayed.path(), config(6), Place::cpu);
  std::vector<double> curve;
  int64_t until = 0;
  for (const Place place : {Place::cpu, Place::device, Place::cpu}) {
    until += 2;
    const VocabularyRun part = train_in(moved.path(), config(until), place);
    curve.insert(curve.end(), part.curve.begin(), part.curve.end());
  }
  expect_same(curve, expected.curve);
}

TEST_P(DeviceDefaults, AModelThatIsLoadedHasTheRowsOfTheRunThatSavedIt) {
  const GenerateOptions options{.max_tokens = 10, .seed = 3};
  const auto text_on = [&](const std::string& folder, c10::Device device) {
    return generate(*load_model(folder, device).model, {'T', 'h', 'e'}, options);
  };
  const TemporaryFolder on_cpu, on_device;
  train_in(on_cpu.path(), config(2), Place::cpu);
  train_in(on_device.path(), config(2), Place::device);
  const auto expected = text_on(on_cpu.path(), c10::kCPU);
  EXPECT_EQ(text_on(on_device.path(), c10::kCPU), expected);
  EXPECT_EQ(text_on(on_device.path(), lagging_device(1)), expected);
}

INSTANTIATE_TEST_SUITE_P(RanksOfTp, DeviceDefaults, ::testing::Values(1, 2));

}  // namespace
}  // namespace lockstep::testing
