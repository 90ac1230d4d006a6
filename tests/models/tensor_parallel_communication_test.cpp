#include <gtest/gtest.h>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/finalize_model_grads.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/tests/support/gpt_parts.h"
#include "lockstep/tests/support/rank_threads.h"
#include "lockstep/tests/support/throws_with.h"

// What a GPT that is cut over tensor-parallel ranks sends, and what it refuses.

namespace lockstep {
namespace {

using testing::CollectiveLog;
using testing::Layout;
using testing::run_ranks;
using testing::sample_ids;
using testing::small_gpt;
using testing::throws_with;

constexpr int64_t kSequences = 2;

/// "all_reduce (sum) of decoder.layers.0... output: 1024", for each call of rank 0.
std::vector<std::string> sent(const CollectiveLog& log) {
  std::vector<std::string> result;
  for (const auto& call : log.of_rank(0)) {
    std::string label = call.label;
    if (const size_t at = label.find("decoder.layers.0."); at != std::string::npos)
      label.erase(at, 17);
    result.push_back(fmt::format("{} of {}: {}", call.operation, label, call.bytes));
  }
  return result;
}

/// The calls of a stage in forward and backward.
std::vector<std::string> sent_by(const TransformerConfig& config, const Layout& layout,
                                 const GPTStage& stage) {
  CollectiveLog log;
  run_ranks(
      layout.tensor,
      [&](const ParallelState& state) {
        const GPTModel model(config, layout.parallel(), state, stage, {.dtype = at::kDouble});
        const at::Tensor ids = sample_ids(config, kSequences);
        GPTInput input{.tokens = ids.slice(1, 0, -1), .labels = ids.slice(1, 1)};
        const int64_t parts = layout.sequence ? layout.tensor : 1;
        if (!stage.has_embedding)
          input.hidden =
              at::ones({config.seq_length / parts, kSequences, config.hidden_size}, at::kDouble)
                  .requires_grad_(true);
        model.forward(input).sum().backward();
      },
      layout.threads(&log));
  return sent(log);
}

TEST(TensorParallel, ALayerSendsWhatTheFormulaSays) {
  const TransformerConfig config = small_gpt();
  const GPTStage layer{.first_layer = 0, .num_layers = 1};
  const int64_t bytes = config.seq_length * kSequences * config.hidden_size * 8;
  using Sent = std::vector<std::string>;
  EXPECT_EQ(sent_by(config, {1}, layer), Sent{});
  const auto line = [](const char* operation, const char* label, int64_t of_bytes) {
    return fmt::format("{} of {}: {}", operation, label, of_bytes);
  };
  constexpr const char *kReduce = "all_reduce (sum)", *kGather = "all_gather",
                       *kScatter = "reduce_scatter (sum)";
  for (const int64_t n : {2, 4}) {
    EXPECT_EQ(sent_by(config, {n}, layer),
              (Sent{line(kReduce, "self_attention.linear_proj output", bytes),
                    line(kReduce, "mlp.linear_fc2 output", bytes),
                    line(kReduce, "gradient of mlp.linear_fc1 input", bytes),
                    line(kReduce, "gradient of self_attention.linear_qkv input", bytes)}));
    EXPECT_EQ(sent_by(config, {n, true}, layer),
              (Sent{line(kGather, "self_attention.linear_qkv input", bytes / n),
                    line(kScatter, "self_attention.linear_proj output", bytes),
                    line(kGather, "mlp.linear_fc1 input", bytes / n),
                    line(kScatter, "mlp.linear_fc2 output", bytes),
                    line(kGather, "gradient of mlp.linear_fc2 output", bytes / n),
                    line(kGather, "mlp.linear_fc1 input again", bytes / n),
                    line(kScatter, "gradient of mlp.linear_fc1 input", bytes),
                    line(kGather, "gradient of self_attention.linear_proj output", bytes / n),
                    line(kGather, "self_attention.linear_qkv input again", bytes / n),
                    line(kScatter, "gradient of self_attention.linear_qkv input", bytes)}));
  }
}

TEST(TensorParallel, LatentAttentionSendsItsCompressedVectorsAndSharedKeys) {
  TransformerConfig config = small_gpt();
  config.multi_latent_attention = true;
  config.q_lora_rank = 6;
  config.kv_lora_rank = 10;
  config.qk_head_dim = 5;
  config.qk_pos_emb_head_dim = 2;
  config.v_head_dim = 3;
  const GPTStage layer{.first_layer = 0, .num_layers = 1};
  const int64_t token = config.seq_length * kSequences * 8;
  const auto attention = [&](bool sequence) {
    std::vector<std::string> calls;
    for (std::string& call : sent_by(config, {2, sequence}, layer))
      if (call.find("mlp") == std::string::npos) calls.push_back(std::move(call));
    return calls;
  };
  const auto line = [&](const char* call, int64_t width) {
    return fmt::format("{}: {}", call, width * token);
  };
  EXPECT_EQ(attention(false),
            (std::vector<std::string>{
                line("all_reduce (sum) of self_attention.linear_proj output", 16),
                line("all_reduce (sum) of gradient of self_attention.shared key channels", 2),
                line("all_reduce (sum) of gradient of self_attention.linear_kv_up_proj input", 10),
                line("all_reduce (sum) of gradient of self_attention.linear_q_up_proj input", 6)}));
  const auto half = [&](const char* call, int64_t width) { return line(call, width / 2); };
  EXPECT_EQ(
      attention(true),
      (std::vector<std::string>{
          half("all_gather of self_attention.linear_q_up_proj input", 6),
          half("all_gather of self_attention.linear_kv_up_proj input", 10),
          half("all_gather of self_attention.shared key channels", 2),
          line("reduce_scatter (sum) of self_attention.linear_proj output", 16),
          half("all_gather of gradient of self_attention.linear_proj output", 16),
          line("reduce_scatter (sum) of gradient of self_attention.shared key channels", 2),
          half("all_gather of self_attention.linear_kv_up_proj input again", 10),
          line("reduce_scatter (sum) of gradient of self_attention.linear_kv_up_proj input", 10),
          half("all_gather of self_attention.linear_q_up_proj input again", 6),
          line("reduce_scatter (sum) of gradient of self_attention.linear_q_up_proj input", 6)}));
}

TEST(TensorParallel, TheEndsOfTheModelSendTwoAllReducesForTheLoss) {
  const TransformerConfig config = small_gpt();
  const GPTStage ends{.has_embedding = true, .has_loss = true};
  const int64_t tokens = config.seq_length * kSequences, bytes = tokens * config.hidden_size * 8;
  const std::string table = "embedding.word_embeddings";
  EXPECT_EQ(
      sent_by(config, {2}, ends),
      (std::vector<std::string>{
          fmt::format("all_reduce (sum) of {} output: {}", table, bytes),
          fmt::format("all_reduce (max) of highest logit: {}", tokens * 8),
          fmt::format("all_reduce (sum) of label's logit and sum of exponentials: {}", tokens * 16),
          fmt::format("all_reduce (sum) of gradient of {} input: {}", table, bytes)}));
}

TEST(TensorParallel, RanksThatShareAQueryGroupExchangeItsFeatures) {
  TransformerConfig config = small_gpt();
  config.num_query_groups = 2;
  const auto calls = sent_by(config, {4}, {.first_layer = 0, .num_layers = 1});
  const int64_t features = config.seq_length * kSequences * (2 + 2) * 4 * 8;
  ASSERT_EQ(calls.size(), 6u);
  EXPECT_EQ(calls[0], fmt::format("all_gather of self_attention.query group: {}", features / 2));
  EXPECT_EQ(calls[4], fmt::format("reduce_scatter (sum) of gradient of self_attention.query group: "
                                  "{}",
                                  features));
}

TEST(TensorParallel, FinalizeSumsTheNormsOfSequenceParallelismAlone) {
  TransformerConfig config = small_gpt();
  config.add_bias_linear = true;
  for (const bool sequence : {false, true}) {
    const Layout layout{2, sequence};
    run_ranks(
        2,
        [&](const ParallelState& state) {
          const GPTModel model(config, layout.parallel(), state, GPTStage::whole(config));
          DistributedDataParallel ddp(model, state);
          const at::Tensor ids = sample_ids(config, kSequences);
          model.forward(ids.slice(1, 0, -1), ids.slice(1, 1)).sum().backward();
          int64_t parameters = 0;
          for (const auto& entry : finalize_model_grads({&ddp}, at::full({}, 16)).entries)
            if (entry.pass == "partial gradients") parameters += entry.parameters;
          // For each layer, two norms and two biases of row-parallel layers; and the final norm.
          EXPECT_EQ(parameters, sequence ? config.num_layers * 4 + 1 : 0);
        },
        layout.threads());
  }
}

TEST(TensorParallel, RefusesWhatDoesNotFitBeforeAnythingIsSent) {
  CollectiveLog log;
  const auto refusal = [&](const TransformerConfig& config, const ParallelConfig& parallel,
                           const std::string& part) {
    run_ranks(
        2,
        [&](const ParallelState& state) {
          EXPECT_TRUE(throws_with<Error>(
              [&] { GPTModel(config, parallel, state, GPTStage::whole(config)); }, part));
        },
        Layout{2}.threads(&log));
  };
  TransformerConfig config = small_gpt();
  config.num_attention_heads = 1;
  config.num_query_groups = 1;
  refusal(config, Layout{2}.parallel(), "model.num_attention_heads (1)");
  config = small_gpt();
  config.seq_length = 7;
  refusal(config, Layout{2, true}.parallel(), "model.seq_length: found 7");
  refusal(small_gpt(), Layout{1, true}.parallel(), "parallel.sequence_parallel: found true");
  refusal(small_gpt(), Layout{1}.parallel(), "parallel.tensor_model_parallel_size: found 1");
  run_ranks(
      2,
      [&](const ParallelState& state) {
        const GPTModel model(small_gpt(), Layout{2, true}.parallel(), state,
                             GPTStage::whole(small_gpt()));
        const auto refused = [&](const GPTInput& input, const char* part) {
          EXPECT_TRUE(throws_with<UsageError>([&] { model.forward(input); }, part));
        };
        refused({.tokens = at::zeros({1, 7}, at::kLong)}, "tokens: found a sequence of 7");
        refused({.tokens = at::full({1, 8}, 11)}, "tokens: found token id 11, allowed: 0 to 10");
        refused({.tokens = at::zeros({1, 8}, at::kLong), .labels = at::full({1, 8}, -1)},
                "labels: found token id -1, allowed: 0 to 10, or -100");
        refused({}, "tokens: found nothing");
        refused({.tokens = at::zeros({1, 8}, at::kLong), .last_only = true},
                "last_only: found sequences that tp or cp cuts");
      },
      Layout{2}.threads(&log));
  EXPECT_TRUE(log.of_rank(0).empty());
  EXPECT_TRUE(log.of_rank(1).empty());
}

}  // namespace
}  // namespace lockstep
