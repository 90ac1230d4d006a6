// Pipelines of the reference GPT: they train as one process does; the messages that they send; the
// layouts that are refused.

#include "lockstep/tests/training/trainer_layouts.h"

#include <gtest/gtest.h>

#include <atomic>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::joined;
using testing::Outcome;
using testing::Overrides;
using testing::throws_with;
using testing::TrainerLayout;
using testing::TrainerLayoutsTest;

const Overrides kUntied = {"model.untie_embeddings_and_output_weights=true", "model.vocab_size=257",
                           "model.num_query_groups=1", "model.add_qkv_bias=true"};

TEST_F(TrainerLayoutsTest, PipelinesTrainAsOneProcessBitForBit) {
  std::map<std::string, Outcome> one_process;
  for (const auto& [layout, more] : std::vector<std::pair<TrainerLayout, Overrides>>{
           {{.pp = 2}, {}},
           {{.pp = 4}, {}},
           {{.pp = 2, .vpp = 2}, {}},
           {{.pp = 4, .vpp = 2}, {"parallel.microbatch_group_size_per_vp_stage=8"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=gpipe"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=zb-h1"}}}) {
    std::vector<Overrides> runs;
    for (const char* precision : {"train.precision=fp64", "train.precision=fp32"})
      runs.push_back(joined(
          joined(kUntied, layout.depth()),
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

TEST_F(TrainerLayoutsTest, ADecoupledRateMovesTheTiedEmbeddingAloneOnEveryStage) {
  const auto run = [](const char* iterations, const char* rate) {
    return Overrides{std::string("train.train_iters=") + iterations,
                     std::string("optimizer.decoupled_lr=") + rate, "ddp.bucket_size=500"};
  };
  const auto one =
      train_all({}, {run("0", "0.01"), run("1", "0.01"), run("1", "0.04"), run("4", "0.04")});
  for (const auto& [key, start] : one[0].weights) {
    const at::Tensor same = one[1].weights.at(key).tensor, other = one[2].weights.at(key).tensor;
    if (key.first == "embedding.word_embeddings.weight")
      EXPECT_TRUE(at::allclose(other - start.tensor, 4 * (same - start.tensor), 1e-9, 1e-15));
    else
      EXPECT_TRUE(at::equal(other, same)) << key.first;
  }
  const auto two = train_all(
      {.pp = 2}, {run("4", "0.04"), joined(run("4", "0.04"), {"optimizer.decoupled_min_lr=0.01"})});
  for (const Outcome& found : two) expect_close(found, one[3], 1e-12, 1);
}

TEST_F(TrainerLayoutsTest, UnevenStagesAndOtherSchedules) {
  const Overrides deep = {"model.num_layers=8", "train.train_iters=3"};
  const Outcome expected = train({}, deep);
  for (const auto& [layout, more] : std::vector<std::pair<TrainerLayout, Overrides>>{
           {{.pp = 4, .vpp = 2}, {"parallel.pipeline_model_parallel_layout=E|t*3|t|t|t|t||tL"}},
           {{.pp = 2, .vpp = 2},
            {"parallel.pipeline_model_parallel_layout=Et*4|t*3||tL", "ddp.align_param_gather=true",
             "ddp.overlap_param_gather=true", "ddp.use_distributed_optimizer=true"}},
           {{.pp = 3}, {"parallel.num_layers_in_first_pipeline_stage=2"}},
           {{.tp = 2, .pp = 3, .vpp = 1}, {"parallel.num_layers_in_last_pipeline_stage=0"}},
           {{.pp = 3}, {"parallel.account_for_loss_in_pipeline_split=true"}},
           {{.pp = 5},
            {"parallel.account_for_embedding_in_pipeline_split=true",
             "parallel.account_for_loss_in_pipeline_split=true"}},
           {{.tp = 2, .sp = true, .pp = 2, .dp = 2},
            {"parallel.pipeline_schedule=zb-h1", "ddp.use_distributed_optimizer=true"}},
           {{.pp = 4}, {"parallel.pipeline_schedule=zb-h1", "model.recompute_granularity=full"}},
           {{.tp = 2, .sp = true, .pp = 2, .dp = 2},
            {"model.cross_entropy_chunk_size=5", "parallel.pipeline_schedule=zb-h1",
             "ddp.use_distributed_optimizer=true"}},
           {{.pp = 2, .vpp = 2},
            {"model.cross_entropy_chunk_size=7", "model.recompute_granularity=full"}},
           {{.pp = 2}, {"model.cross_entropy_chunk_size=4", "parallel.pipeline_schedule=gpipe"}},
           {{.dp = 2},
            {"model.cross_entropy_chunk_size=3", "ddp.overlap_grad_reduce=true",
             "ddp.overlap_param_gather=true", "ddp.use_distributed_optimizer=true"}},
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

/// 257 tokens are 258 rows on two ranks of tp.
TEST_F(TrainerLayoutsTest, PaddingOfTheVocabularyIsNotAmongTheZerosOfTheGradient) {
  const auto zeros = [&](const TrainerLayout& layout) {
    const Config counting = config(
        joined(layout.overrides(), joined(kUntied, {"optimizer.log_num_zeros_in_grad=true"})));
    testing::RankThreadOptions options;
    options.sizes.tensor = layout.tp;
    std::atomic<int64_t> found = 0;
    run_ranks(
        layout.ranks(),
        [&](const ParallelState& state) {
          found = Trainer(counting, state).train_step().num_zeros_in_grad.value_or(-1);
        },
        options);
    return found.load();
  };
  const int64_t expected = zeros({});
  EXPECT_GT(expected, 0) << "there are ids that no sample has";
  EXPECT_EQ(zeros({.tp = 2}), expected);
}

TEST_F(TrainerLayoutsTest, ValidationTakesAllThereIsWhereMoreIsAskedFor) {
  const auto loss = [&](const char* iterations) {
    const Config all = config({std::string("train.eval_iters=") + iterations});
    return Trainer(all, ParallelState::single_process()).validate().validation_loss;
  };
  EXPECT_GT(loss("1000"), 1);
  EXPECT_EQ(loss("4611686018427387904"), loss("1000"));  // times the batch: beyond 64 bits
}

TEST_F(TrainerLayoutsTest, WhatAStepSendsBetweenStages) {
  CollectiveLog log;
  constexpr int64_t kFew = 2;
  train({.tp = 2, .sp = true, .pp = 2, .vpp = 2, .dp = 2},
        {"train.eval_iters=0", "train.train_iters=" + std::to_string(kFew)}, &log);
  // 2 micro-batches per rank in 4 virtual stages; activations [8 / 2, 2, 16] of 8 bytes
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
