// The reference GPT trains the same on every layout of tensor, sequence, pipeline and data
// parallelism.

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/error.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/training/trainer.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::run_ranks;
using testing::TemporaryFolder;
using testing::throws_with;
using Overrides = std::vector<std::string>;

constexpr int kSteps = 3;

struct Layout {
  int64_t tp = 1;
  bool sp = false;
  int64_t pp = 1;
  int64_t vpp = 1;
  int64_t dp = 1;

  int64_t ranks() const { return tp * pp * dp; }

  Overrides overrides() const {
    Overrides list = {"parallel.tensor_model_parallel_size=" + std::to_string(tp),
                      "parallel.pipeline_model_parallel_size=" + std::to_string(pp),
                      "train.micro_batch_size=" + std::to_string(2 / dp)};
    if (sp) list.emplace_back("parallel.sequence_parallel=true");
    if (vpp > 1)
      list.push_back("parallel.virtual_pipeline_model_parallel_size=" + std::to_string(vpp));
    return list;
  }

  std::string text() const {
    return "tp " + std::to_string(tp) + (sp ? " sp" : "") + ", pp " + std::to_string(pp) + " x " +
           std::to_string(vpp) + ", dp " + std::to_string(dp);
  }
};

std::vector<Layout> all_layouts() {
  std::vector<Layout> list;
  for (const int64_t tp : {1, 2, 4})
    for (const bool sp : {false, true})
      for (const int64_t pp : {1, 2, 4})
        for (const int64_t vpp : {1, 2})
          for (const int64_t dp : {1, 2})
            if (tp * pp * dp <= 8 && (tp > 1 || !sp) && (pp > 1 || vpp == 1))
              list.push_back({tp, sp, pp, vpp, dp});
  return list;
}

/// What rank 0 saw: losses and norms of all steps, then the validation loss; and the weights of all
/// ranks, by name and rank of tp.
struct Outcome {
  std::vector<double> curve;
  std::map<std::pair<std::string, int64_t>, NamedParameter> weights;
};

class TrainerLayoutsTest : public ::testing::Test {
 protected:
  TrainerLayoutsTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const Overrides& overrides) const {
    Overrides all = {"data.path=" + path_, "train.train_iters=" + std::to_string(kSteps),
                     "train.precision=fp64"};
    all.insert(all.end(), overrides.begin(), overrides.end());
    return parse_config(
        "model { num_layers: 8 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 16 "
        "seq_length: 8 vocab_size: 256 } "
        "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 1 } "
        "parallel { desync_check_interval: 2 } "
        "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }",
        "test", all);
  }

  Outcome train(const Layout& layout, const Overrides& overrides,
                CollectiveLog* log = nullptr) const {
    Overrides all = layout.overrides();
    all.insert(all.end(), overrides.begin(), overrides.end());
    const Config config = this->config(all);
    testing::RankThreadOptions options;
    options.sizes.tensor = layout.tp;
    options.sizes.pipeline = layout.pp;
    options.sizes.virtual_pipeline = config.parallel.virtual_pipeline_model_parallel_size;
    options.sizes.order = config.parallel.order;
    options.log = log;
    Outcome outcome;
    std::mutex mutex;
    run_ranks(
        layout.ranks(),
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
          EXPECT_TRUE(outcome.curve.empty() || curve == outcome.curve) << state.rank();
          outcome.curve = curve;
          const int64_t part = *state.grids().groups(GroupKind::tp).position_of(state.rank());
          for (const auto& chunk : trainer.training_model().chunks())
            for (NamedParameter& param : collect_parameters(*chunk)) {
              param.tensor = param.tensor.detach().clone();
              const auto [place, first] =
                  outcome.weights.emplace(std::pair(param.name, part), param);
              EXPECT_TRUE(first || at::equal(place->second.tensor, param.tensor)) << param.name;
            }
        },
        options);
    return outcome;
  }

  /// Whether all of `found` is `expected` to within `tolerance` times the largest element.
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

  /// What rank `rank` of tp holds of `whole`; without the padding of the vocabulary.
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

/// Models, with their names of fields.
const std::vector<Overrides> kModels = {
    {},
    {"model.num_query_groups=2", "model.untie_embeddings_and_output_weights=true"},
    {"model.num_query_groups=2", "model.add_bias_linear=true", "model.normalization=LayerNorm",
     "model.activation=gelu", "model.position_embedding_type=learned_absolute"},
    {"model.num_query_groups=1", "model.untie_embeddings_and_output_weights=true",
     "model.vocab_size=257", "model.add_qkv_bias=true", "model.recompute_granularity=full",
     "model.recompute_num_layers=3"},
};

/// What must not matter.
const std::vector<Overrides> kReductions = {
    {},
    {"ddp.overlap_grad_reduce=false"},
    {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true", "ddp.bucket_size=1000"},
    {"ddp.use_distributed_optimizer=true", "ddp.overlap_grad_reduce=false"},
    {"ddp.calculate_per_token_loss=false", "ddp.use_distributed_optimizer=true"},
};

Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

TEST_F(TrainerLayoutsTest, EveryLayoutTrainsAsOneProcessInDouble) {
  std::vector<Outcome> expected;
  for (const Overrides& model : kModels) expected.push_back(train({}, model));
  for (const Outcome& outcome : expected)
    EXPECT_LT(outcome.curve[2 * (kSteps - 1)], outcome.curve[0] - 0.01);  // it learns
  size_t k = 0;
  for (const Layout& layout : all_layouts())
    for (int turn = 0; turn < (layout.ranks() > 2 ? 1 : 2); ++turn, ++k) {
      const size_t model = (k + k / 8) % kModels.size();
      const Overrides& reduction = kReductions[k % kReductions.size()];
      SCOPED_TRACE(layout.text() + ", model " + std::to_string(model) + ", reduction " +
                   std::to_string(k % kReductions.size()));
      expect_close(train(layout, joined(kModels[model], reduction)), expected[model], 1e-12,
                   layout.tp);
    }
}

TEST_F(TrainerLayoutsTest, SinglePrecisionAgreesToTwoInAHundredThousand) {
  const Overrides fp32 = {"train.precision=fp32", "optimizer.adam_eps=1e-4"};
  const Outcome expected = train({}, joined(kModels[1], fp32));
  for (const Layout& layout : {Layout{.tp = 2, .sp = true, .pp = 2, .vpp = 2, .dp = 2},
                               Layout{.tp = 4, .pp = 2}, Layout{.pp = 4, .vpp = 2, .dp = 2}}) {
    SCOPED_TRACE(layout.text());
    expect_close(train(layout, joined(kModels[1], fp32)), expected, 2e-5, layout.tp);
  }
}

TEST_F(TrainerLayoutsTest, PipelinesTrainAsOneProcessBitForBit) {
  for (const char* precision : {"train.precision=fp64", "train.precision=fp32"}) {
    const Overrides model =
        joined(kModels[1], {precision, "optimizer.clip_grad=0", "train.micro_batch_size=1"});
    const Outcome expected = train({}, model);
    for (const auto& [layout, more] : std::vector<std::pair<Layout, Overrides>>{
             {{.pp = 2}, {}},
             {{.pp = 4}, {}},
             {{.pp = 2, .vpp = 2}, {}},
             {{.pp = 4, .vpp = 2}, {"parallel.microbatch_group_size_per_vp_stage=8"}},
             {{.pp = 4}, {"parallel.pipeline_schedule=gpipe"}},
             {{.pp = 4}, {"parallel.pipeline_schedule=zb-h1"}}}) {
      SCOPED_TRACE(layout.text() + (more.empty() ? "" : more[0]) + ", " + precision);
      const Outcome found = train(layout, joined(model, more));
      for (size_t i = 0; i < found.curve.size(); i += 2)
        EXPECT_EQ(found.curve[i], expected.curve[i]) << i;
      for (const auto& [key, param] : found.weights)
        EXPECT_TRUE(at::equal(param.tensor, expected.weights.at(key).tensor)) << key.first;
    }
  }
}

TEST_F(TrainerLayoutsTest, UnevenStagesAndOtherSchedules) {
  const Outcome expected = train({}, {});
  for (const auto& [layout, more] : std::vector<std::pair<Layout, Overrides>>{
           {{.pp = 4, .vpp = 2}, {"parallel.pipeline_model_parallel_layout=E|t*3|t|t|t|t||tL"}},
           {{.pp = 3}, {"parallel.num_layers_in_first_pipeline_stage=2"}},
           {{.tp = 2, .pp = 3, .vpp = 1}, {"parallel.num_layers_in_last_pipeline_stage=0"}},
           {{.pp = 3}, {"parallel.account_for_loss_in_pipeline_split=true"}},
           {{.pp = 5},
            {"parallel.account_for_embedding_in_pipeline_split=true",
             "parallel.account_for_loss_in_pipeline_split=true"}},
           {{.tp = 2, .sp = true, .pp = 2, .dp = 2},
            {"parallel.pipeline_schedule=zb-h1", "ddp.use_distributed_optimizer=true"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=zb-h1", "model.recompute_granularity=full"}},
           {{.pp = 2, .dp = 2},
            {"parallel.pipeline_schedule=gpipe", "train.rampup_batch_size=4 4 8"}},
           {{.tp = 2, .pp = 2, .dp = 2}, {"parallel.order=tp-cp-ep-pp-dp"}}}) {
    SCOPED_TRACE(layout.text() + " " + more[0]);
    if (more.back().starts_with("train.rampup"))
      expect_close(train(layout, more), train({}, {more.back()}), 1e-12, layout.tp);
    else
      expect_close(train(layout, more), expected, 1e-12, layout.tp);
  }
}

TEST_F(TrainerLayoutsTest, WhatAStepSendsBetweenStages) {
  CollectiveLog log;
  train({.tp = 2, .sp = true, .pp = 2, .vpp = 2, .dp = 2}, {"train.eval_iters=0"}, &log);
  // 4 micro-batches of a rank in 4 virtual stages; activations [8 / 2, 1, 16] of 8 bytes
  for (int64_t rank = 0; rank < 8; ++rank) {
    int64_t sent = 0, received = 0, bytes = 0;
    for (const CollectiveRecord& record : log.of_rank(rank)) {
      if (record.group != "pp" || record.label.find("input of") == std::string::npos) continue;
      (record.operation.starts_with("send") ? sent : received) += 1;
      bytes += record.bytes;
    }
    // Of 3 boundaries the first rank sends over 2 forward and 1 backward; the last the reverse.
    EXPECT_EQ(sent, kSteps * 4 * 3) << rank;
    EXPECT_EQ(received, kSteps * 4 * 3) << rank;
    EXPECT_EQ(bytes, kSteps * 4 * 6 * 4 * 16 * 8) << rank;
  }
}

TEST_F(TrainerLayoutsTest, WhatCannotBeLaidOutIsRefusedByNameBeforeAnythingIsSent) {
  const auto refused = [&](const Overrides& overrides, int64_t world, const std::string& part) {
    return throws_with<ConfigError>(
        [&] {
          const Config config = this->config(overrides);
          check_supported(config);
          check_layout(config, world);
        },
        part);
  };
  EXPECT_TRUE(refused({"parallel.tensor_model_parallel_size=3"}, 3, "model.num_attention_heads"));
  EXPECT_TRUE(refused({"parallel.sequence_parallel=true"}, 1, "parallel.sequence_parallel"));
  EXPECT_TRUE(refused({"parallel.pipeline_model_parallel_size=3"}, 3, "model.num_layers (8)"));
  EXPECT_TRUE(refused({"parallel.virtual_pipeline_model_parallel_size=2"}, 1,
                      "parallel.virtual_pipeline_model_parallel_size: found 2"));
  EXPECT_TRUE(refused({"parallel.pipeline_model_parallel_size=2"}, 3, "(3)"));
  EXPECT_TRUE(
      refused({"parallel.pipeline_model_parallel_size=4",
               "parallel.virtual_pipeline_model_parallel_size=2", "train.global_batch_size=3"},
              4, "microbatches: found 3"));
  EXPECT_TRUE(refused(
      {"parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2",
       "parallel.pipeline_schedule=zb-h1"},
      2, "parallel.pipeline_schedule (zb-h1)"));
  EXPECT_TRUE(refused({"parallel.pipeline_model_parallel_size=2",
                       "parallel.pipeline_model_parallel_layout=Et*8|L|"},
                      2, "pipeline layout 'Etttttttt|L|'"));
  EXPECT_TRUE(refused(
      {"parallel.pipeline_model_parallel_size=2", "parallel.pipeline_model_parallel_layout=Et*8L|"},
      2, "the loss (L) on the last"));
  EXPECT_TRUE(refused({"parallel.pipeline_model_parallel_size=3",
                       "parallel.pipeline_model_parallel_layout=Et*8||L"},
                      3, "pipeline rank 1 holds nothing"));
  EXPECT_TRUE(refused({"train.global_batch_size=5"}, 2, "train.global_batch_size: found 5"));
}

}  // namespace
}  // namespace lockstep
