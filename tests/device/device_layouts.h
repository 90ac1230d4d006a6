#pragma once

#include <map>
#include <ostream>
#include <set>
#include <string>
#include <vector>

/// Layouts that train on asynchronous devices, and how often their hosts may wait.
namespace lockstep::testing {

using Overrides = std::vector<std::string>;

/// How often a rank's host may wait for its device in a step after the first: once for the numbers
/// of the step, and with expert parallelism or FP8 once for each layer of experts in each forward.
inline constexpr int64_t kWaitsOfAStep = 1;
inline constexpr int64_t kWaitsOfExchangedExperts = 1;

struct DeviceLayout {
  std::string name;
  int64_t world = 1;
  Overrides overrides = {};
  /// With expert parallelism or FP8: a rank's layers of experts, times its micro-batches.
  int64_t exchanged_experts = 0;
  /// Tolerance where the device uses another kernel than the CPU: for weights relative to the
  /// largest element, and for losses and norms.
  double tolerance = 0;
  int ranks_per_device = 1;
  int64_t fingerprints = 0;  ///< read from the device in a step, with a wait each

  int64_t waits() const {
    return kWaitsOfAStep + exchanged_experts * kWaitsOfExchangedExperts + fingerprints;
  }
};

inline void PrintTo(const DeviceLayout& layout, std::ostream* out) { *out << layout.name; }

inline Overrides with(Overrides first, const Overrides& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

inline Overrides parallel(const std::map<std::string, int64_t>& sizes, const Overrides& more = {}) {
  Overrides list;
  for (const auto& [axis, size] : sizes)
    list.push_back("parallel." + axis + "_parallel_size=" + std::to_string(size));
  return with(list, more);
}

/// Four layers, and eight micro-batches per step unless a layout changes it.
inline constexpr char kDeviceModel[] =
    "model { num_layers: 4 hidden_size: 16 num_attention_heads: 4 ffn_hidden_size: 32 "
    "seq_length: 16 vocab_size: 256 position_embedding_type: \"rope\" } "
    "train { global_batch_size: 8 micro_batch_size: 1 eval_iters: 1 train_iters: 3 } "
    "optimizer { lr: 0.01 weight_decay: 0.1 clip_grad: 0.5 lr_decay_style: \"constant\" }";

inline const Overrides kDouble = {"train.precision=fp64"};
inline const Overrides kOverlap = {"ddp.overlap_grad_reduce=true", "ddp.bucket_size=1000"};
inline const Overrides kSharded =
    with(kOverlap, {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true"});
inline const Overrides kShardedGrads = {"ddp.data_parallel_sharding_strategy=optim_grads"};
inline constexpr const char* kShardedParams =
    "ddp.data_parallel_sharding_strategy=optim_grads_params";
inline const Overrides kExperts = {"model.num_experts=4", "model.moe_router_topk=2",
                                   "model.moe_aux_loss_coeff=0.1", "model.moe_z_loss_coeff=0.01"};
inline const Overrides kOffloaded = {"optimizer.offload=true", "model.recompute_granularity=full",
                                     "model.offload_activations=true"};
inline const Overrides kOffloadedLayers = {"model.offload_activations=true"};
inline const Overrides kSequence = {"parallel.sequence_parallel=true"};

/// Attention over parts of the context uses another kernel on a device.
inline constexpr double kContextTolerance = 1e-10;

inline DeviceLayout context(const std::string& name, int64_t size, const Overrides& more) {
  return {.name = name,
          .world = size,
          .overrides = parallel({{"context", size}}, with(kDouble, more)),
          .tolerance = kContextTolerance};
}

inline std::vector<DeviceLayout> data_layouts() {
  return {
      {.name = "one_rank"},
      {.name = "recomputed", .overrides = {"model.recompute_granularity=full"}},
      {.name = "dp2", .world = 2},
      {.name = "dp2_average", .world = 2, .overrides = {"ddp.calculate_per_token_loss=false"}},
      {.name = "dp2_average_bf16",
       .world = 2,
       .overrides = {"ddp.calculate_per_token_loss=false", "ddp.grad_reduce_in_fp32=false",
                     "train.precision=bf16"}},
      {.name = "dp2_bf16_gradients",
       .world = 2,
       .overrides = {"ddp.grad_reduce_in_fp32=false", "train.precision=bf16"}},
      {.name = "dp2_fp16",
       .world = 2,
       .overrides = {"train.precision=fp16", "optimizer.initial_loss_scale=256"}},
      {.name = "dp2_overlap", .world = 2, .overrides = kOverlap},
      {.name = "dp2_sharded", .world = 2, .overrides = kSharded},
      {.name = "dp2_sharded_bf16",
       .world = 2,
       .overrides = with(kSharded, {"train.precision=bf16"})},
      {.name = "dp2_sharded_at_once",
       .world = 2,
       .overrides = {"ddp.overlap_grad_reduce=false", "ddp.use_distributed_optimizer=true"}},
      {.name = "dp2_sharded_muon",
       .world = 2,
       .overrides = with(kSharded, {"optimizer.optimizer=muon"})},
      {.name = "dp2_sharded_gradients", .world = 2, .overrides = with(kSharded, kShardedGrads)},
      {.name = "dp2_sharded_params",
       .world = 2,
       .overrides = {"ddp.use_distributed_optimizer=true", "ddp.overlap_param_gather=true",
                     kShardedParams}},
      {.name = "dp4_sharded_params_recomputed",
       .world = 4,
       .overrides = with(
           kSharded, {kShardedParams, "train.precision=bf16", "model.recompute_granularity=full"})},
      {.name = "dp2_sgd", .world = 2, .overrides = {"optimizer.optimizer=sgd"}},
      {.name = "dp4_sharded_instances",
       .world = 4,
       .overrides = with(kSharded, {"parallel.num_distributed_optimizer_instances=2"})},
  };
}

/// The optimizer's state and the inputs of recomputed layers are in host memory.
inline std::vector<DeviceLayout> offloaded_layouts() {
  const Overrides bf16 = {"train.precision=bf16"};
  return {
      {.name = "state", .overrides = {"optimizer.offload=true"}},
      {.name = "activations",
       .overrides = {"model.recompute_granularity=full", "model.offload_activations=true"}},
      {.name = "layers", .overrides = kOffloadedLayers},
      {.name = "layers_dropout_bf16",
       .overrides =
           with(kOffloadedLayers, {"train.precision=bf16", "model.hidden_dropout=0.1",
                                   "model.attention_dropout=0.1", "model.add_bias_linear=true",
                                   "model.activation=gelu", "model.normalization=LayerNorm"})},
      {.name = "layers_selective",
       .overrides = with(kOffloadedLayers, {"model.recompute_granularity=selective"})},
      {.name = "layers_behind_recomputed",
       .overrides = with(kOffloaded, {"model.recompute_num_layers=2"})},
      {.name = "layers_dp2_sharded_params",
       .world = 2,
       .overrides = with(kSharded, with(kOffloadedLayers, {kShardedParams}))},
      {.name = "layers_tp2_sp",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(kOffloadedLayers, kSequence))},
      {.name = "layers_pp2",
       .world = 2,
       .overrides = parallel({{"pipeline_model", 2}}, kOffloadedLayers)},
      {.name = "layers_pp2_interleaved",
       .world = 2,
       .overrides =
           parallel({{"pipeline_model", 2}, {"virtual_pipeline_model", 2}}, kOffloadedLayers)},
      context("layers_cp2", 2, kOffloadedLayers),
      context("layers_cp2_a2a", 2, with(kOffloadedLayers, {"parallel.cp_comm_type=a2a"})),
      {.name = "layers_pp2_zb",
       .world = 2,
       .overrides = parallel({{"pipeline_model", 2}},
                             with(kOffloadedLayers, {"parallel.pipeline_schedule=zb-h1"}))},
      {.name = "layers_experts",
       .overrides = with(kExperts, with(kOffloadedLayers,
                                        {"model.moe_shared_expert_intermediate_size=8",
                                         "model.moe_router_load_balancing_type=global_aux_loss"}))},
      {.name = "layers_experts_pp2",
       .world = 2,
       .overrides = parallel({{"pipeline_model", 2}},
                             with(with(kExperts, kOffloadedLayers),
                                  {"model.num_experts=8", "model.moe_aux_loss_coeff=0.1",
                                   "model.moe_router_load_balancing_type=global_aux_loss"}))},
      {.name = "layers_experts_ep2_dp4_sharded_params",
       .world = 4,
       .overrides = parallel({{"expert_model", 2}}, with(with(kExperts, kSharded),
                                                         with(kOffloadedLayers, {kShardedParams}))),
       .exchanged_experts = 2 * 4},
      {.name = "both",
       .overrides =
           with(kOffloaded, {"model.recompute_method=uniform", "model.recompute_num_layers=3"})},
      {.name = "sgd", .overrides = with(kOffloaded, {"optimizer.optimizer=sgd"})},
      {.name = "bf16", .overrides = with(kOffloaded, bf16)},
      {.name = "fp16",
       .overrides = with(kOffloaded, {"train.precision=fp16", "optimizer.initial_loss_scale=256"})},
      {.name = "skipped",
       .overrides = {"optimizer.offload=true", "optimizer.grad_norm_skip_threshold=0.9"}},
      {.name = "dp2_sharded", .world = 2, .overrides = with(kSharded, with(kOffloaded, bf16))},
      {.name = "dp2_sharded_at_once",
       .world = 2,
       .overrides = with(kOffloaded,
                         {"ddp.overlap_grad_reduce=false", "ddp.use_distributed_optimizer=true"})},
      {.name = "dp2_sharded_gradients",
       .world = 2,
       .overrides = with(kSharded, with(kOffloaded, kShardedGrads))},
      {.name = "dp2_sharded_params",
       .world = 2,
       .overrides = with(kSharded, with(kOffloaded, {kShardedParams, "train.precision=bf16"}))},
      {.name = "tp2_parts",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}},
                             with(kOffloaded, {"model.distribute_saved_activations=true"}))},
      {.name = "tp2_sp_dropout",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}},
                             with(kOffloaded, with(kSequence, {"model.hidden_dropout=0.1"})))},
      {.name = "pp2", .world = 2, .overrides = parallel({{"pipeline_model", 2}}, kOffloaded)},
      {.name = "pp3_interleaved",
       .world = 3,
       .overrides = parallel({{"pipeline_model", 3}, {"virtual_pipeline_model", 2}},
                             with(kOffloaded, {"model.num_layers=6", "train.global_batch_size=6",
                                               "model.recompute_num_layers=1"}))},
      {.name = "pp2_dp2_sharded_params",
       .world = 4,
       .overrides =
           parallel({{"pipeline_model", 2}}, with(kSharded, with(kOffloaded, {kShardedParams})))},
  };
}

inline std::vector<DeviceLayout> model_layouts() {
  return {
      {.name = "tp2", .world = 2, .overrides = parallel({{"tensor_model", 2}})},
      {.name = "tp2_sp_dropout",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, with(kSequence, {"model.hidden_dropout=0.1"}))},
      {.name = "tp2_recomputed",
       .world = 2,
       .overrides = parallel({{"tensor_model", 2}}, {"model.recompute_granularity=full",
                                                     "model.distribute_saved_activations=true"})},
      {.name = "pp2", .world = 2, .overrides = parallel({{"pipeline_model", 2}})},
      {.name = "pp2_dp2_sharded_params",
       .world = 4,
       .overrides = parallel({{"pipeline_model", 2}}, with(kSharded, {kShardedParams}))},
      {.name = "pp2_gpipe",
       .world = 2,
       .overrides = parallel({{"pipeline_model", 2}}, {"parallel.pipeline_schedule=gpipe"})},
      {.name = "pp2_zb",
       .world = 2,
       .overrides = parallel({{"pipeline_model", 2}}, {"parallel.pipeline_schedule=zb-h1"})},
      {.name = "pp4_zb",
       .world = 4,
       .overrides = parallel({{"pipeline_model", 4}}, {"parallel.pipeline_schedule=zb-h1"})},
      {.name = "pp3_interleaved",
       .world = 3,
       .overrides = parallel({{"pipeline_model", 3}, {"virtual_pipeline_model", 2}},
                             {"model.num_layers=6", "train.global_batch_size=6"})},
      {.name = "pp4_interleaved",
       .world = 4,
       .overrides = parallel({{"pipeline_model", 4}, {"virtual_pipeline_model", 2}},
                             {"model.num_layers=8"})},
      context("cp2_p2p", 2, {}),
      context("cp2_a2a", 2, {"parallel.cp_comm_type=a2a"}),
      context("cp2_all_gather", 2, {"parallel.cp_comm_type=all_gather"}),
      context("cp4_p2p", 4, {}),
      context(
          "cp4_a2a_p2p", 4,
          {"parallel.cp_comm_type=a2a+p2p", "parallel.hierarchical_context_parallel_sizes=2,2"}),
      {.name = "tp2_pp2_dp2",
       .world = 8,
       .overrides =
           with(parallel({{"tensor_model", 2}, {"pipeline_model", 2}}, kSequence), kSharded)},
  };
}

}  // namespace lockstep::testing
