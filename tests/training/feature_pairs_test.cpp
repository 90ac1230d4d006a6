// Features that other tests try one at a time, here combined: ten steps of the Trainer against one
// process.

#include <fmt/ranges.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lockstep/tests/support/synthetic_text.h"
#include "lockstep/tests/support/temporary_folder.h"
#include "lockstep/tests/training/layout_curves.h"

namespace lockstep {
namespace {

using Fields = std::vector<std::string>;

Fields both(Fields first, const Fields& more) {
  first.insert(first.end(), more.begin(), more.end());
  return first;
}

const Fields kLatent = {"model.multi_latent_attention=true",
                        "model.qk_layernorm=true",
                        "model.q_lora_rank=8",
                        "model.kv_lora_rank=6",
                        "model.qk_head_dim=4",
                        "model.qk_pos_emb_head_dim=2",
                        "model.v_head_dim=5",
                        "model.rope_scaling_type=yarn",
                        "model.rope_scaling_factor=4",
                        "model.rope_original_max_position_embeddings=8"};
const Fields kAdapters = {
    "lora.rank=3", "lora.alpha=6", "optimizer.lr=0.03", "lora.dropout=0.25",
    R"(lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])"};
const Fields kExperts = {
    "model.num_experts=4",          "model.moe_router_topk=2",
    "model.moe_aux_loss_coeff=0",   "model.moe_layer_freq=[0, 1]",
    "model.moe_ffn_hidden_size=12", "model.moe_shared_expert_intermediate_size=8"};
const Fields kChunks = {"model.cross_entropy_chunk_size=5", "model.label_smoothing=0.1"};
const Fields kUntied = {"model.untie_embeddings_and_output_weights=true"};
const Fields kSharded = {"ddp.use_distributed_optimizer=true"};
const Fields kShardedGrads = both(kSharded, {"ddp.data_parallel_sharding_strategy=optim_grads"});
const Fields kShardedParams = both(
    kSharded,
    {"ddp.data_parallel_sharding_strategy=optim_grads_params", "ddp.overlap_param_gather=true"});
const Fields kSpikes = {"train.on_spike=skip", "train.spike_window=2", "train.spike_zscore=2"};

const char* const kTensor = "tensor_model_parallel_size=2";
const char* const kSequence = "sequence_parallel=true";
const char* const kContext = "context_parallel_size=2";
const char* const kPipeline = "pipeline_model_parallel_size=2";
const char* const kExpert = "expert_model_parallel_size=2";
const char* const kSplitBackward = "pipeline_schedule=zb-h1";

/// Ten steps of fine-tuning on conversations.
class FeaturePairsTest : public testing::LayoutCurvesTest {
 protected:
  FeaturePairsTest() {
    conversations_ = {"data.path=" + folder_.write("a.jsonl", testing::synthetic_conversations()),
                      "data.split=95,5", "data.chat_template=plain", "train.task=sft",
                      "model.vocab_size=257"};
  }

  Fields tuned(const Fields& more) const { return both(conversations_, more); }

  testing::TemporaryFolder folder_;
  Fields conversations_;
};

TEST_F(FeaturePairsTest, LatentAttentionOnConversationsInChunks) {
  const Fields model = tuned(both(kLatent, kChunks));
  expect_equal_to_one_process(model, 4, {kContext, kTensor, kSequence});
  expect_equal_to_one_process(model, 4, {kPipeline, kContext});
  expect_equal_to_one_process(both(model, kUntied), 4, {kPipeline, kTensor, kSplitBackward});
  expect_equal_to_one_process(both(model, kShardedParams), 4, {kContext});
  expect_equal_to_one_process(both(model, kShardedParams), 4, {kPipeline});
  expect_equal_to_one_process(both(model, both(kShardedGrads, kUntied)), 4, {kTensor, kSequence});
}

TEST_F(FeaturePairsTest, AdaptersOnConversationsInChunks) {
  const Fields model = tuned(both(kAdapters, kChunks));
  expect_equal_to_one_process(model, 4, {kContext, kTensor, kSequence});
  expect_equal_to_one_process(model, 4, {kPipeline, kContext});
  expect_equal_to_one_process(both(model, kUntied), 4, {kPipeline, kTensor, kSplitBackward});
  for (const Fields& strategy : {kShardedGrads, kShardedParams}) {
    expect_equal_to_one_process(both(model, strategy), 4, {kContext});
    expect_equal_to_one_process(both(model, strategy), 4, {kPipeline});
    expect_equal_to_one_process(both(model, strategy), 4, {kTensor, kSequence});
  }
  expect_equal_to_one_process(
      both(model, {"train.global_batch_size=6", "model.recompute_granularity=full"}), 3, {});
}

TEST_F(FeaturePairsTest, ExpertsBehindLatentAttention) {
  const Fields model = tuned(both(both(kLatent, kExperts), kChunks));
  expect_equal_to_one_process(model, 4, {kExpert, kContext});
  expect_equal_to_one_process(model, 4, {kExpert, kPipeline});
  expect_equal_to_one_process(both(model, kShardedGrads), 4,
                              {kExpert, kTensor, "expert_tensor_parallel_size=1", kSequence});
  expect_equal_to_one_process(both(model, kShardedParams), 4, {kExpert});
}

TEST_F(FeaturePairsTest, MeansOfMicrobatches) {
  const Fields model = tuned(both(kChunks, {"ddp.calculate_per_token_loss=false"}));
  expect_equal_to_one_process(model, 2, {kTensor, kSequence});
  expect_equal_to_one_process(model, 2, {kPipeline});
  expect_equal_to_one_process(both(model, kShardedParams), 2, {});
  expect_equal_to_one_process(both(model, kShardedGrads), 4, {kPipeline});
}

TEST_F(FeaturePairsTest, SkippedSpikes) {
  const Fields model = tuned(both(kSpikes, kChunks));
  for (const Fields& more : {Fields(), kAdapters})
    EXPECT_NE(curve(config(both(model, more), {}), 1),
              curve(config(tuned(both(kChunks, more)), {}), 1))
        << "no step was skipped, which would change the numbers after it";
  expect_equal_to_one_process(model, 4, {kPipeline, kContext});
  expect_equal_to_one_process(both(model, kShardedParams), 4, {kPipeline});
  expect_equal_to_one_process(both(model, kAdapters), 4, {kTensor, kContext});
}

}  // namespace
}  // namespace lockstep
