#pragma once

#include "lockstep/tests/device/device_layouts.h"

/// Features of models and runs apart from their layout, on asynchronous devices.
namespace lockstep::testing {

/// Two of the state, one of the gradients, and two of the gradients of replayed micro-batches.
inline constexpr int64_t kFingerprints = 5;
inline constexpr char kConversations[] = "train.task=sft";
inline const Overrides kTuned = {kConversations, "data.chat_template=plain", "model.vocab_size=257",
                                 "model.make_vocab_size_divisible_by=1"};
/// The runs with this field read documents whose ends are in the samples.
inline constexpr char kPositionsInDocuments[] = "data.reset_position_ids=true";
inline const Overrides kAdapters = {
    "lora.rank=3", "lora.dropout=0.25",
    R"(lora.target_modules=["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"])"};
inline const Overrides kLatent = {"model.multi_latent_attention=true",
                                  "model.qk_layernorm=true",
                                  "model.q_lora_rank=8",
                                  "model.kv_lora_rank=6",
                                  "model.qk_head_dim=4",
                                  "model.qk_pos_emb_head_dim=2",
                                  "model.v_head_dim=5",
                                  "model.rope_scaling_type=yarn",
                                  "model.rope_scaling_factor=4",
                                  "model.rope_original_max_position_embeddings=8"};
inline const Overrides kFp8 = {"train.fp8=hybrid", "train.fp8_amax_history_len=2",
                               "model.hidden_size=32", "model.seq_length=16"};
inline const Overrides kChecked = {"train.replica_check_interval=1", "train.replay_interval=2"};
inline const Overrides kOverlapped = {"parallel.tp_comm_overlap=true"};
inline const Overrides kChunks = {"model.cross_entropy_chunk_size=5", "model.label_smoothing=0.1"};

/// Attention within documents uses another kernel on a device.
inline DeviceLayout tuned(const std::string& name, int64_t world, const Overrides& more) {
  return {.name = name,
          .world = world,
          .overrides = with(with(kTuned, kDouble), more),
          .tolerance = kContextTolerance};
}

inline std::vector<DeviceLayout> feature_layouts() {
  return {
      tuned("conversations", 1, {}),
      tuned("conversations_dp2_sharded_params", 2, with(kSharded, {kShardedParams})),
      tuned("conversations_cp2", 2, parallel({{"context", 2}}, kChunks)),
      tuned("conversations_latent_tp2", 2,
            parallel({{"tensor_model", 2}}, with(kSequence, kLatent))),
      tuned("conversations_average_pp2", 2,
            parallel({{"pipeline_model", 2}}, {"ddp.calculate_per_token_loss=false"})),
      {.name = "positions_in_documents",
       .overrides = {kPositionsInDocuments, "data.eod_mask_loss=true", "model.vocab_size=257",
                     "model.make_vocab_size_divisible_by=1"}},
      {.name = "adapters_tp2_sp",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(kSequence, kAdapters))},
      {.name = "adapters_pp2_dp2_sharded_bf16",
       .world = 4,
       .overrides = parallel({{"pipeline_model", 2}},
                             with(kSharded, with(kAdapters, {"train.precision=bf16"})))},
      {.name = "adapters_offloaded_layers", .overrides = with(kAdapters, kOffloadedLayers)},
      {.name = "fp8_offloaded_layers",
       .overrides = with(kFp8, with(kOffloadedLayers, {"train.precision=bf16"}))},
      {.name = "latent_offloaded_layers", .overrides = with(kLatent, kOffloadedLayers)},
      tuned("conversations_offloaded_layers", 1, kOffloadedLayers),
      {.name = "latent_tp2_sp",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(kSequence, kLatent))},
      {.name = "latent_pp2_zb_bf16",
       .world = 2,
       .overrides =
           parallel({{"pipeline_model", 2}},
                    with(kLatent, {"parallel.pipeline_schedule=zb-h1", "train.precision=bf16"}))},
      {.name = "checked_dp2_bf16",
       .world = 2,
       .overrides = with(kChecked, {"train.precision=bf16", "model.hidden_dropout=0.25"}),
       .fingerprints = kFingerprints},
      {.name = "checked_dp2_tp2_sharded",
       .world = 4,
       .overrides = parallel({{"tensor_model", 2}}, with(kSharded, kChecked)),
       .fingerprints = kFingerprints},
      {.name = "fp8_dp2_bf16", .world = 2, .overrides = with(kFp8, {"train.precision=bf16"})},
      {.name = "fp8_biases", .overrides = with(kFp8, {"model.add_bias_linear=true"})},
      {.name = "fp8_tp2_sp_sharded",
       .world = 4,
       .overrides = parallel({{"tensor_model", 2}}, with(kSequence, with(kSharded, kFp8)))},
      {.name = "fp8_experts_bf16",
       .overrides = with(kFp8, with(kExperts, {"train.precision=bf16"})),
       .exchanged_experts = 4 * 8},
      {.name = "fp8_experts_ep2_tp2_sp",
       .world = 4,
       .overrides = parallel({{"tensor_model", 2}, {"expert_model", 2}, {"expert_tensor", 1}},
                             with(kSequence, with(kFp8, kExperts))),
       .exchanged_experts = 4 * 4},
      {.name = "overlapped_tp2",
       .world = 2,
       .overrides =
           parallel({{"tensor_model", 2}},
                    with(kOverlapped, {"train.precision=bf16", "model.recompute_granularity=full",
                                       "model.distribute_saved_activations=true"}))},
      {.name = "overlapped_tp2_sp_recomputed_sharded_params",
       .world = 4,
       .overrides =
           parallel({{"tensor_model", 2}},
                    with(with(kSequence, kOverlapped),
                         with(kSharded, {kShardedParams, "model.recompute_granularity=full"})))},
      {.name = "overlapped_tp4_sp_odd",
       .world = 4,
       .overrides = parallel(
           {{"tensor_model", 4}},
           with(with(kSequence, kOverlapped), {"model.seq_length=20", "model.add_bias_linear=true",
                                               "model.make_vocab_size_divisible_by=1"}))},
      {.name = "overlapped_tp2_sp_pp2_zb",
       .world = 4,
       .overrides =
           parallel({{"tensor_model", 2}, {"pipeline_model", 2}},
                    with(with(kSequence, kOverlapped), {"parallel.pipeline_schedule=zb-h1"}))},
      {.name = "overlapped_adapters_tp2_sp",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(with(kSequence, kOverlapped), kAdapters))},
      {.name = "overlapped_fp8_tp2_sp",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(with(kSequence, kOverlapped), kFp8))},
      {.name = "chunks_dp2_bf16", .world = 2, .overrides = with(kChunks, {"train.precision=bf16"})},
      {.name = "chunks_tp2_sp_sharded_params",
       .world = 4,
       .overrides = parallel({{"tensor_model", 2}},
                             with(with(kSequence, kChunks), with(kSharded, {kShardedParams})))},
  };
}

}  // namespace lockstep::testing
