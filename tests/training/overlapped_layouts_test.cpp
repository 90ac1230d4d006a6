// parallel.tp_comm_overlap combined with everything that allows it: ten steps against one process.

#include <gtest/gtest.h>

#include "lockstep/tests/training/layout_curves.h"

namespace lockstep {
namespace {

using OverlappedLayoutsTest = testing::LayoutCurvesTest;
using Parts = std::vector<std::string>;

Parts overlapped(int64_t ranks, const Parts& more = {}) {
  Parts all = {"tensor_model_parallel_size=" + std::to_string(ranks), "tp_comm_overlap=true"};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

const Parts kOfGpt2 = {"model.position_embedding_type=learned_absolute",
                       "model.normalization=LayerNorm", "model.add_bias_linear=true",
                       "model.activation=gelu_tanh"};
const char* const kOfSequence = "sequence_parallel=true";

TEST_F(OverlappedLayoutsTest, DenseModels) {
  for (const Parts& model : {Parts{"model.num_query_groups=2"}, kOfGpt2})
    for (const int64_t ranks : {2, 4}) {
      expect_equal_to_one_process(model, ranks, overlapped(ranks));
      expect_equal_to_one_process(model, ranks, overlapped(ranks, {kOfSequence}));
    }
  // Chunks of 15 / 3 positions.
  expect_equal_to_one_process(
      {"model.seq_length=15", "model.num_attention_heads=3", "model.hidden_size=12",
       "model.ffn_hidden_size=18", "train.micro_batch_size=2"},
      3, overlapped(3, {kOfSequence}));
  expect_equal_to_one_process({"model.multi_latent_attention=true", "model.qk_layernorm=true",
                               "model.q_lora_rank=8", "model.kv_lora_rank=6", "model.qk_head_dim=4",
                               "model.qk_pos_emb_head_dim=2", "model.v_head_dim=5"},
                              2, overlapped(2, {kOfSequence}));
}

TEST_F(OverlappedLayoutsTest, RecomputationAndTheLossInChunks) {
  for (const char* const what :
       {"model.recompute_granularity=full", "model.recompute_granularity=selective",
        "model.cross_entropy_chunk_size=5"})
    for (const Parts& more : {Parts{}, Parts{kOfSequence}})
      expect_equal_to_one_process({what}, 2, overlapped(2, more));
}

TEST_F(OverlappedLayoutsTest, AdaptersAndDropout) {
  expect_equal_to_one_process(
      {"lora.rank=3", "lora.dropout=0.25",
       R"(lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])"},
      2, overlapped(2, {kOfSequence}));
  expect_equal_to_one_process({"model.hidden_dropout=0.1", "model.attention_dropout=0.1"}, 2,
                              overlapped(2, {kOfSequence}));
}

TEST_F(OverlappedLayoutsTest, OtherAxesBeside) {
  // With zb-h1 the gradients of weights come after backward.
  expect_equal_to_one_process(
      {}, 4,
      overlapped(2, {kOfSequence, "pipeline_model_parallel_size=2", "pipeline_schedule=zb-h1"}));
  expect_equal_to_one_process({}, 4, overlapped(2, {"pipeline_model_parallel_size=2"}));
  expect_equal_to_one_process({}, 4, overlapped(2, {kOfSequence, "context_parallel_size=2"}));
  for (const char* const strategy : {"optim", "optim_grads_params"})
    expect_equal_to_one_process(
        {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
         "ddp.bucket_size=1000", std::string("ddp.data_parallel_sharding_strategy=") + strategy},
        4, overlapped(2, {kOfSequence}));
}

TEST_F(OverlappedLayoutsTest, Experts) {
  const Parts experts = {"model.num_experts=4", "model.moe_router_topk=2",
                         "model.moe_shared_expert_intermediate_size=8"};
  expect_equal_to_one_process(experts, 2, overlapped(2, {kOfSequence}));
  expect_equal_to_one_process(experts, 4,
                              overlapped(2, {kOfSequence, "expert_model_parallel_size=2"}));
  expect_equal_to_one_process(
      experts, 4, overlapped(2, {"expert_model_parallel_size=2", "expert_tensor_parallel_size=1"}));
}

}  // namespace
}  // namespace lockstep
