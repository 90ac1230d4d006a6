// Documents in samples, and conversations, train the same on every layout: ten steps of the Trainer
// against one process.

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "lockstep/core/error.h"
#include "lockstep/datasets/conversation_source.h"
#include "lockstep/tests/support/synthetic_documents.h"
#include "lockstep/tests/support/throws_with.h"
#include "lockstep/tests/training/layout_curves.h"

namespace lockstep {
namespace {

using testing::throws_with;
using Fields = std::vector<std::string>;
using Ids = std::vector<int64_t>;

const Fields kFourExperts = {"model.num_experts=4", "model.moe_router_topk=2",
                             "model.moe_aux_loss_coeff=0"};
const char* const kTensorRanks = "tensor_model_parallel_size=2";
const char* const kStages = "pipeline_model_parallel_size=2";
const char* const kContextRanks = "context_parallel_size=2";

/// Ten steps on a data set whose documents end within samples.
class MarkedCurvesTest : public testing::LayoutCurvesTest {
 protected:
  MarkedCurvesTest() { set_ = testing::write_documents(folder_.path() / "set"); }

  Fields model(const Fields& more) const {
    Fields fields = {"data.path=" + set_, "model.vocab_size=257"};
    fields.insert(fields.end(), more.begin(), more.end());
    return fields;
  }

  testing::TemporaryFolder folder_;
  std::string set_;
};

TEST_F(MarkedCurvesTest, TrainTheSameOnEveryLayout) {
  const Fields all = model({"data.reset_position_ids=true", "data.reset_attention_mask=true",
                            "data.eod_mask_loss=true"});
  expect_equal_to_one_process(all, 2, {});
  expect_equal_to_one_process(all, 2, {kTensorRanks, "sequence_parallel=true"});
  expect_equal_to_one_process(all, 2, {kStages});
  expect_equal_to_one_process(all, 2, {kContextRanks});
  expect_equal_to_one_process(all, 4, {kContextRanks, kTensorRanks});
  Fields sharded = all;
  sharded.emplace_back("ddp.use_distributed_optimizer=true");
  expect_equal_to_one_process(sharded, 4, {kContextRanks});
}

TEST_F(MarkedCurvesTest, EachOptionCounts) {
  const std::vector<double> none = curve(config(model({}), {}), 1);
  for (const char* const option :
       {"data.reset_position_ids", "data.reset_attention_mask", "data.eod_mask_loss"}) {
    SCOPED_TRACE(option);
    const Fields with = model({std::string(option) + "=true"});
    const std::vector<double> found = curve(config(with, {}), 1);
    EXPECT_GT(std::abs(found[0] - none[0]), 1e-9);
    expect_equal_to_one_process(with, 2, {kContextRanks});
  }
}

TEST_F(MarkedCurvesTest, GraphsOfTheDeviceRefuseWhatChangesWithTheMicrobatch) {
  const auto check = [&](Fields fields) {
    fields.emplace_back("train.cuda_graph=step");
    return [this, fields] { check_supported(config(model(fields), {})); };
  };
  EXPECT_TRUE(throws_with<ConfigError>(check({"data.reset_attention_mask=true"}),
                                       "train.cuda_graph = step: found data.reset_attention_mask"));
  EXPECT_TRUE(throws_with<ConfigError>(
      check({"data.eod_mask_loss=true", "ddp.calculate_per_token_loss=false"}),
      "found data.eod_mask_loss with ddp.calculate_per_token_loss = false"));
  check({"data.reset_position_ids=true", "data.eod_mask_loss=true"})();
}

/// Ten steps of fine-tuning on conversations.
class FineTuningCurvesTest : public testing::LayoutCurvesTest {
 protected:
  FineTuningCurvesTest() {
    std::string lines;
    for (int i = 0; i < 200; ++i)
      lines += fmt::format(
          "{{\"messages\": [{{\"role\": \"user\", \"content\": \"{}?\"}}, "
          "{{\"role\": \"assistant\", \"content\": \"{}\"}}]}}\n",
          i % 10, std::string(static_cast<size_t>(i * i % 9), static_cast<char>('a' + i % 10)));
    fields_ = {"data.path=" + folder_.write("a.jsonl", lines), "data.split=95,5",
               "data.chat_template=plain", "train.task=sft", "model.vocab_size=257"};
  }

  Fields with(const Fields& more) const {
    Fields fields = fields_;
    fields.insert(fields.end(), more.begin(), more.end());
    return fields;
  }

  testing::TemporaryFolder folder_;
  Fields fields_;
};

TEST_F(FineTuningCurvesTest, TrainTheSameOnEveryLayout) {
  expect_equal_to_one_process(with({}), 2, {});
  expect_equal_to_one_process(with({}), 2, {kTensorRanks, "sequence_parallel=true"});
  expect_equal_to_one_process(with({}), 2, {kStages});
  for (const char* const kind : {"p2p", "all_gather", "a2a"})
    expect_equal_to_one_process(with({}), 2, {kContextRanks, fmt::format("cp_comm_type={}", kind)});
  expect_equal_to_one_process(with(kFourExperts), 2, {"expert_model_parallel_size=2"});
  expect_equal_to_one_process(with({"ddp.use_distributed_optimizer=true"}), 4, {kContextRanks});
}

TEST_F(FineTuningCurvesTest, TheLossIsAMeanOverLearnedTokens) {
  const Config config = this->config(with({}), {});
  const ParallelState state = ParallelState::single_process();
  const SampleSources sources = open_conversations(config.data, config.model.vocab_size,
                                                   config.model.seq_length, config.train.seed);
  int64_t learned = 0;
  for (int64_t sample = 0; sample < 4; ++sample) {
    Ids ids(static_cast<size_t>(config.model.seq_length + 1));
    sources.training->read(sample, ids);
    for (const uint8_t flag : sources.training->marks(sample, ids).loss) learned += flag;
  }
  Trainer trainer(config, state);
  ASSERT_EQ(trainer.notes().size(), 1U);
  EXPECT_TRUE(trainer.notes()[0].starts_with("data.path: 200 conversations in "));
  const IterationMetrics metrics = trainer.train_step();
  EXPECT_EQ(metrics.num_tokens, 4 * config.model.seq_length);
  EXPECT_EQ(metrics.num_loss_tokens, learned);
}

TEST_F(FineTuningCurvesTest, WhatCannotBeIsRefusedByName) {
  const auto check = [&](const Fields& fields) {
    return [this, fields] { check_supported(config(with(fields), {})); };
  };
  check({})();
  EXPECT_TRUE(throws_with<ConfigError>(check({"model.vocab_size=256"}),
                                       "model.vocab_size: found 256, allowed with train.task = "
                                       "sft and data.tokenizer = byte: > 256"));
  EXPECT_TRUE(throws_with<ConfigError>(check({"train.cuda_graph=microbatch"}),
                                       "train.cuda_graph = microbatch: found train.task = sft"));
}

}  // namespace
}  // namespace lockstep
