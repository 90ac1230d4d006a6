// The reference GPT trains the same on every layout of its parallel dimensions.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <mutex>
#include <set>
#include <tuple>

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

constexpr int kSteps = 10;

struct Layout {
  int64_t tp = 1;
  bool sp = false;
  int64_t pp = 1;
  int64_t vpp = 1;
  int64_t dp = 1;

  int64_t ranks() const { return tp * pp * dp; }

  /// Micro-batches of a step; fewer are faster.
  int64_t microbatches() const { return std::max<int64_t>(pp, 2); }

  /// One for each chunk, at least 2.
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

Overrides joined(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

class TrainerLayoutsTest : public ::testing::Test {
 protected:
  TrainerLayoutsTest() { path_ = folder_.write("text", testing::synthetic_text()); }

  Config config(const Overrides& overrides) const {
    Overrides all = {"data.path=" + path_, "train.train_iters=" + std::to_string(kSteps),
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

  /// Runs of one layout, one after another in the same groups.
  std::vector<Outcome> train_all(const Layout& layout, const std::vector<Overrides>& runs,
                                 CollectiveLog* log = nullptr) const {
    std::vector<Config> configs;
    for (const Overrides& run : runs) configs.push_back(config(joined(layout.overrides(), run)));
    testing::RankThreadOptions options;
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

  Outcome train(const Layout& layout, const Overrides& overrides,
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

/// A choice of the options that must not matter, or that one process can do as well: 8 rows, in
/// which every pair of values of two options occurs.
struct Choice {
  explicit Choice(size_t row)
      : untied((row & 1) != 0),
        grouped((row & 2) != 0),
        biased((row & 4) != 0),
        distributed(untied != grouped),
        overlapped(untied != biased) {}
  bool untied, grouped, biased, distributed, overlapped;

  /// What one process trains too. What comes along with the biases and the untied output layer has
  /// no column of its own.
  Overrides model() const {
    Overrides list;
    const auto add = [&](bool chosen, const Overrides& more) {
      if (chosen) list.insert(list.end(), more.begin(), more.end());
    };
    add(untied, {"model.untie_embeddings_and_output_weights=true", "model.vocab_size=257"});
    add(grouped, {"model.num_query_groups=2"});
    add(grouped && untied, {"model.num_query_groups=1", "model.add_qkv_bias=true"});
    add(biased, {"model.add_bias_linear=true", "model.normalization=LayerNorm",
                 "model.activation=gelu", "model.position_embedding_type=learned_absolute"});
    add(untied && biased, {"model.recompute_granularity=full", "model.recompute_num_layers=2"});
    return list;
  }

  Overrides run(const Layout& layout) const {
    Overrides list = model();
    const std::string on = overlapped ? "true" : "false";
    list.push_back("ddp.overlap_grad_reduce=" + on);
    if (distributed)
      list.insert(list.end(), {"ddp.use_distributed_optimizer=true",
                               "ddp.overlap_param_gather=" + on, "ddp.bucket_size=1000"});
    if (untied && biased && layout.tp > 1 && !layout.sp)
      list.emplace_back("model.distribute_saved_activations=true");
    return list;
  }

  /// The values of all factors, beside those of the layout.
  std::vector<int64_t> factors(const Layout& layout) const {
    return {layout.tp, layout.sp, layout.pp, layout.vpp,  layout.dp,
            untied,    grouped,   biased,    distributed, overlapped};
  }
};

constexpr size_t kChoices = 8;

/// Pairs of values of two factors.
void add_pairs(const std::vector<int64_t>& factors,
               std::set<std::tuple<size_t, int64_t, size_t, int64_t>>& pairs) {
  for (size_t i = 0; i < factors.size(); ++i)
    for (size_t k = 0; k < i; ++k) pairs.emplace(k, factors[k], i, factors[i]);
}

Overrides depth(const Layout& layout) {
  return {"model.num_layers=" + std::to_string(layout.layers())};
}

const Overrides kSingle = {"train.precision=fp32", "optimizer.adam_eps=1e-4"};

// Every layout in double precision, with one choice each, and every third in single precision too.
TEST_F(TrainerLayoutsTest, EveryLayoutTrainsAsOneProcess) {
  std::map<std::tuple<int64_t, size_t, bool>, Outcome> one_process;
  const auto expected = [&](const Layout& layout, size_t row, bool single) -> const Outcome& {
    Outcome& outcome = one_process[{layout.layers(), row, single}];
    if (outcome.curve.empty()) {
      outcome = train(
          {}, joined(joined(Choice(row).model(), depth(layout)), single ? kSingle : Overrides{}));
      EXPECT_LT(outcome.curve[2 * (kSteps - 1)], outcome.curve[0] - 0.05);  // it learns
    }
    return outcome;
  };
  std::set<std::tuple<size_t, int64_t, size_t, int64_t>> covered, all;
  const std::vector<Layout> layouts = all_layouts();
  for (size_t k = 0; k < layouts.size(); ++k) {
    const Layout& layout = layouts[k];
    const size_t row = (k + k / 8) % kChoices, single_row = (row + 3) % kChoices;
    const bool single = k % 3 == 1;
    SCOPED_TRACE(layout.text() + ", choice " + std::to_string(row));
    std::vector<Overrides> runs = {joined(Choice(row).run(layout), depth(layout))};
    if (single)
      runs.push_back(joined(joined(Choice(single_row).run(layout), depth(layout)), kSingle));
    const std::vector<Outcome> found = train_all(layout, runs);
    expect_close(found[0], expected(layout, row, false), 1e-12, layout.tp);
    if (single) expect_close(found[1], expected(layout, single_row, true), 2e-5, layout.tp);
    add_pairs(Choice(row).factors(layout), covered);
    for (size_t any = 0; any < kChoices; ++any) add_pairs(Choice(any).factors(layout), all);
  }
  EXPECT_EQ(covered, all);  // every pair that a layout allows
}

TEST_F(TrainerLayoutsTest, PipelinesTrainAsOneProcessBitForBit) {
  std::map<std::string, Outcome> one_process;
  for (const auto& [layout, more] : std::vector<std::pair<Layout, Overrides>>{
           {{.pp = 2}, {}},
           {{.pp = 4}, {}},
           {{.pp = 2, .vpp = 2}, {}},
           {{.pp = 4, .vpp = 2}, {"parallel.microbatch_group_size_per_vp_stage=8"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=gpipe"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=zb-h1"}}}) {
    std::vector<Overrides> runs;
    for (const char* precision : {"train.precision=fp64", "train.precision=fp32"})
      runs.push_back(joined(
          joined(Choice(3).model(), depth(layout)),
          {precision, "optimizer.clip_grad=0", "train.micro_batch_size=1", "train.train_iters=4"}));
    std::vector<Overrides> pipelined;
    for (const Overrides& run : runs) pipelined.push_back(joined(run, more));
    const std::vector<Outcome> found = train_all(layout, pipelined);
    for (size_t r = 0; r < runs.size(); ++r) {
      SCOPED_TRACE(layout.text() + (more.empty() ? "" : more[0]) + ", run " + std::to_string(r));
      Outcome& expected = one_process[std::to_string(layout.layers()) + " " + std::to_string(r)];
      if (expected.curve.empty()) expected = train({}, runs[r]);
      for (size_t i = 0; i < found[r].curve.size(); i += 2)
        EXPECT_EQ(found[r].curve[i], expected.curve[i]) << i;
      for (const auto& [key, param] : found[r].weights)
        EXPECT_TRUE(at::equal(param.tensor, expected.weights.at(key).tensor)) << key.first;
    }
  }
}

TEST_F(TrainerLayoutsTest, UnevenStagesAndOtherSchedules) {
  const Overrides deep = {"model.num_layers=8", "train.train_iters=3"};
  const Outcome expected = train({}, deep);
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
      expect_close(train(layout, joined(deep, more)), train({}, joined(deep, {more.back()})), 1e-12,
                   layout.tp);
    else
      expect_close(train(layout, joined(deep, more)), expected, 1e-12, layout.tp);
  }
}

TEST_F(TrainerLayoutsTest, WhatAStepSendsBetweenStages) {
  CollectiveLog log;
  constexpr int64_t kFew = 2;
  train({.tp = 2, .sp = true, .pp = 2, .vpp = 2, .dp = 2},
        {"train.eval_iters=0", "train.train_iters=" + std::to_string(kFew)}, &log);
  // 2 micro-batches of a rank in 4 virtual stages; activations [8 / 2, 2, 16] of 8 bytes
  for (int64_t rank = 0; rank < 8; ++rank) {
    int64_t sent = 0, received = 0, bytes = 0;
    for (const CollectiveRecord& record : log.of_rank(rank)) {
      if (record.group != "pp" || record.label.find("input of") == std::string::npos) continue;
      (record.operation.starts_with("send") ? sent : received) += 1;
      bytes += record.bytes;
    }
    // Of 3 boundaries the first rank sends over 2 forward and 1 backward; the last the reverse.
    EXPECT_EQ(sent, kFew * 2 * 3) << rank;
    EXPECT_EQ(received, kFew * 2 * 3) << rank;
    EXPECT_EQ(bytes, kFew * 2 * 6 * 4 * 2 * 16 * 8) << rank;
  }
}

TEST_F(TrainerLayoutsTest, WhatCannotBeLaidOutIsRefusedByNameBeforeAnythingIsSent) {
  const auto refused = [&](const Overrides& overrides, int64_t world, const std::string& part) {
    return throws_with<ConfigError>(
        [&] {
          const Config config = this->config(joined({"model.num_layers=8"}, overrides));
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
