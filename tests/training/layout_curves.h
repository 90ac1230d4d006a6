#pragma once

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

/// Losses and norms of ten steps on a layout of any axes against those of one process.
namespace lockstep::testing {

class LayoutCurvesTest : public ::testing::Test {
 protected:
  LayoutCurvesTest() { path_ = folder_.write("text", synthetic_text()); }

  Config config(const std::vector<std::string>& model,
                const std::vector<std::string>& layout) const {
    // 7 windows of validation text, which two ranks cannot share evenly.
    std::vector<std::string> all = {"data.path=" + path_, "data.split=97,3",
                                    "train.precision=fp64"};
    all.insert(all.end(), model.begin(), model.end());
    for (const std::string& field : layout) all.push_back("parallel." + field);
    return parse_config(
        "model { num_layers: 2 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
        "seq_length: 16 vocab_size: 256 init_method_std: 0.1 } "
        "train { global_batch_size: 4 micro_batch_size: 1 eval_iters: 100 train_iters: 10 } "
        "parallel { desync_check_interval: 2 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Losses and norms of all steps, then the validation loss. They are the same on all ranks.
  static std::vector<double> curve(const Config& config, int64_t world) {
    RankThreadOptions options;
    options.sizes = parallel_options(config, c10::kCPU).sizes;
    std::vector<double> result;
    std::mutex mutex;
    run_ranks(
        world,
        [&](const ParallelState& state) {
          Trainer trainer(config, state);
          std::vector<double> curve;
          TrainCallbacks callbacks;
          callbacks.iteration = [&](const IterationMetrics& metrics) {
            curve.push_back(metrics.lm_loss);
            curve.push_back(metrics.grad_norm);
          };
          callbacks.validation = [&](const ValidationMetrics& metrics) {
            curve.push_back(metrics.validation_loss);
          };
          trainer.run(callbacks);
          const std::lock_guard<std::mutex> lock(mutex);
          EXPECT_TRUE(result.empty() || curve == result) << state.rank();
          result = curve;
        },
        options);
    return result;
  }

  void expect_equal_to_one_process(const std::vector<std::string>& model, int64_t world,
                                   const std::vector<std::string>& layout) const {
    expect_equal(model, world, layout, 1e-12);
  }

  void expect_equal_in_fp32(std::vector<std::string> model, int64_t world,
                            const std::vector<std::string>& layout) const {
    model.emplace_back("train.precision=fp32");
    expect_equal(model, world, layout, 2e-5);
  }

 private:
  /// The curve of one process, cached because the same models recur.
  const std::vector<double>& expected_curve(const std::vector<std::string>& model) const {
    static std::map<std::vector<std::string>, std::vector<double>> curves;
    std::vector<double>& found = curves[model];
    if (found.empty()) found = curve(config(model, {}), 1);
    return found;
  }

  void expect_equal(const std::vector<std::string>& model, int64_t world,
                    const std::vector<std::string>& layout, double tolerance) const {
    const std::vector<double>& expected = expected_curve(model);
    const std::vector<double> found = curve(config(model, layout), world);
    ASSERT_EQ(found.size(), expected.size());
    EXPECT_EQ(expected.size(), 21U);
    for (size_t i = 0; i < expected.size(); ++i)
      ASSERT_NEAR(found[i], expected[i], tolerance * std::abs(expected[i]))
          << i << ", " << world << " ranks: " << fmt::format("{}", fmt::join(layout, " "));
    if (config(model, layout).lora.rank)
      EXPECT_NE(expected[18], expected[0]);  // on random weights adapters learn little
    else
      EXPECT_LT(expected[18], expected[0]);
  }

  TemporaryFolder folder_;
  std::string path_;
};

}  // namespace lockstep::testing
