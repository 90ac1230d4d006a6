#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/training/trainer.h"

/// Ten steps of the reference GPT on a layout of tensor, sequence, pipeline and data parallelism.
namespace lockstep::testing {

using Overrides = std::vector<std::string>;

inline constexpr int kTrainerSteps = 10;

inline Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

struct TrainerLayout {
  int64_t tp = 1;
  bool sp = false;
  int64_t pp = 1;
  int64_t vpp = 1;
  int64_t dp = 1;

  int64_t ranks() const { return tp * pp * dp; }

  /// Micro-batches per step; fewer are faster.
  int64_t microbatches() const { return std::max<int64_t>(pp, 2); }

  /// One layer for each chunk, at least 2.
  int64_t layers() const { return std::max<int64_t>(pp * vpp, 2); }

  Overrides overrides() const {
    Overrides list = {"parallel.tensor_model_parallel_size=" + std::to_string(tp),
                      "parallel.pipeline_model_parallel_size=" + std::to_string(pp),
                      "train.micro_batch_size=" + std::to_string(8 / dp / microbatches())};
    if (sp) list.emplace_back("parallel.sequence_parallel=true");
    if (vpp > 1)
      list.push_back("parallel.virtual_pipeline_model_parallel_size=" + std::to_string(vpp));
    return list;
  }

  Overrides depth() const { return {"model.num_layers=" + std::to_string(layers())}; }

  std::string text() const {
    return "tp " + std::to_string(tp) + (sp ? " sp" : "") + ", pp " + std::to_string(pp) + " x " +
           std::to_string(vpp) + ", dp " + std::to_string(dp);
  }
};

/// Losses and norms of all steps, then the validation loss, as every rank sees them; and the
/// weights of all ranks, by name and rank of tp.
struct Outcome {
  std::vector<double> curve;
  std::map<std::pair<std::string, int64_t>, NamedParameter> weights;
};

class TrainerLayoutsTest : public ::testing::Test {
 protected:
  TrainerLayoutsTest() { path_ = folder_.write("text", synthetic_text()); }

  Config config(const Overrides& overrides) const {
    Overrides all = {"data.path=" + path_, "train.train_iters=" + std::to_string(kTrainerSteps),
                     "train.precision=fp64"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_config(
        "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
        "seq_length: 8 vocab_size: 256 } "
        "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 1 } "
        "parallel { desync_check_interval: 5 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  /// Trains `runs` on one layout, one after another in the same groups.
  std::vector<Outcome> train_all(const TrainerLayout& layout, const std::vector<Overrides>& runs,
                                 CollectiveLog* log = nullptr) const {
    std::vector<Config> configs;
    for (const Overrides& run : runs) configs.push_back(config(joined(layout.overrides(), run)));
    RankThreadOptions options;
    options.sizes.tensor = layout.tp;
    options.sizes.pipeline = layout.pp;
    options.sizes.virtual_pipeline = configs[0].parallel.virtual_pipeline_model_parallel_size;
    options.sizes.order = configs[0].parallel.order;
    options.log = log;
    std::vector<Outcome> outcomes(runs.size());
    std::mutex mutex;
    run_ranks(
        layout.ranks(),
        [&](const ParallelState& state) {
          for (size_t i = 0; i < runs.size(); ++i)
            run_of_rank(configs[i], state, outcomes[i], mutex);
        },
        options);
    return outcomes;
  }

  Outcome train(const TrainerLayout& layout, const Overrides& overrides,
                CollectiveLog* log = nullptr) const {
    return train_all(layout, {overrides}, log).front();
  }

  static void run_of_rank(const Config& config, const ParallelState& state, Outcome& outcome,
                          std::mutex& mutex) {
    Trainer trainer(config, state);
    std::vector<double> curve;
    int64_t samples = 0;
    TrainCallbacks callbacks;
    callbacks.iteration = [&](const IterationMetrics& metrics) {
      curve.push_back(metrics.lm_loss);
      curve.push_back(metrics.grad_norm);
      EXPECT_EQ(metrics.num_tokens, (metrics.consumed_samples - samples) * config.model.seq_length);
      samples = metrics.consumed_samples;
    };
    callbacks.validation = [&](const ValidationMetrics& metrics) {
      curve.push_back(metrics.validation_loss);
    };
    trainer.run(callbacks);
    const std::lock_guard<std::mutex> lock(mutex);
    EXPECT_TRUE(outcome.curve.empty() || curve == outcome.curve) << state.rank();
    outcome.curve = curve;
    const int64_t part = *state.grids().groups(GroupKind::tp).position_of(state.rank());
    for (const auto& chunk : trainer.training_model().chunks())
      for (NamedParameter& param : collect_parameters(*chunk)) {
        param.tensor = param.tensor.detach().clone();
        const auto [place, first] = outcome.weights.emplace(std::pair(param.name, part), param);
        EXPECT_TRUE(first || at::equal(place->second.tensor, param.tensor)) << param.name;
      }
  }

  /// Expects that `found` equals `expected` to within `tolerance` times the largest element.
  static void expect_close(const Outcome& found, const Outcome& expected, double tolerance,
                           int64_t tp) {
    ASSERT_EQ(found.curve.size(), expected.curve.size());
    for (size_t i = 0; i < found.curve.size(); ++i)
      EXPECT_NEAR(found.curve[i], expected.curve[i], tolerance * std::abs(expected.curve[i])) << i;
    size_t names = 0;
    for (const auto& [key, param] : found.weights) {
      names += key.second == 0 ? 1 : 0;
      const at::Tensor whole = expected.weights.at({key.first, 0}).tensor;
      const at::Tensor part = part_of(whole, param, key.second, tp);
      const at::Tensor own = part.sizes() == param.tensor.sizes()
                                 ? param.tensor
                                 : param.tensor.narrow(0, 0, part.size(0));
      const double difference = (own - part).abs().max().item<double>();
      EXPECT_LE(difference, tolerance * std::max(1.0, whole.abs().max().item<double>()))
          << key.first << " on rank " << key.second << " of tp";
    }
    EXPECT_EQ(names, expected.weights.size());
  }

  /// The part of `whole` on rank `rank` of tp, without the padding of the vocabulary.
  static at::Tensor part_of(const at::Tensor& whole, const NamedParameter& param, int64_t rank,
                            int64_t tp) {
    const Placement placement = param.description.placement(MeshAxis::tp);
    const auto* const shard = std::get_if<Shard>(&placement);
    if (shard == nullptr || tp == 1) return whole;
    const int64_t size = param.tensor.size(shard->dim), begin = rank * size;
    return whole.slice(shard->dim, begin, std::min(begin + size, whole.size(shard->dim)));
  }

  TemporaryFolder folder_;
  std::string path_;
};

}  // namespace lockstep::testing
