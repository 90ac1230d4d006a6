#pragma once

#include "lockstep/tests/device/device_layouts.h"

/// Layouts with experts, and layouts whose ranks share devices.
namespace lockstep::testing {

inline const Overrides kBiases = {"model.add_bias_linear=true", "model.activation=gelu",
                                  "model.moe_shared_expert_intermediate_size=8"};
inline const Overrides kCapacity = {"model.moe_expert_capacity_factor=0.8"};
inline const Overrides kPadded = {"model.moe_expert_capacity_factor=1.2",
                                  "model.moe_pad_expert_input_to_capacity=true"};
inline const Overrides kRecompute = {"model.recompute_granularity=full",
                                     "model.recompute_num_layers=4"};
inline const Overrides kGathered = {"model.moe_token_dispatcher_type=allgather"};

/// Without expert parallelism: dropless, with capacity, with biases, recomputed.
inline std::vector<DeviceLayout> expert_layouts() {
  const Overrides balanced = {"model.moe_router_score_function=sigmoid",
                              "model.moe_router_enable_expert_bias=true"};
  const auto experts = [](const std::string& name, int64_t world,
                          const std::map<std::string, int64_t>& sizes, const Overrides& more = {}) {
    return DeviceLayout{
        .name = name, .world = world, .overrides = parallel(sizes, with(kExperts, more))};
  };
  return {
      experts("experts", 1, {}),
      experts("experts_bf16", 1, {}, {"train.precision=bf16"}),
      experts("experts_biases", 1, {}, kBiases),
      experts("experts_biases_bf16", 1, {}, with(kBiases, {"train.precision=bf16"})),
      experts("experts_capacity", 1, {}, with(kCapacity, kBiases)),
      experts("experts_padded", 1, {}, kPadded),
      experts("experts_recomputed", 1, {}, with(kRecompute, kCapacity)),
      experts("experts_gathered", 1, {}, with(kGathered, kCapacity)),
      experts("experts_balanced", 1, {}, balanced),
      experts("dp2_experts_recomputed", 2, {}, {"model.recompute_granularity=full"}),
      experts("dp2_experts_sharded_params", 2, {}, with(kSharded, {kShardedParams})),
      experts("tp2_etp2", 2, {{"tensor_model", 2}}, kSequence),
      experts("tp2_etp2_capacity", 2, {{"tensor_model", 2}}, with(kCapacity, kRecompute)),
      experts("etp2_gathered", 2, {{"expert_tensor", 2}}, with(kGathered, kCapacity)),
  };
}

/// With expert parallelism: four layers of experts, or two if there are two stages, and four
/// micro-batches per rank.
inline std::vector<DeviceLayout> exchanged_layouts() {
  const Overrides balanced = {"model.moe_shared_expert_intermediate_size=16",
                              "model.moe_router_score_function=sigmoid",
                              "model.moe_router_enable_expert_bias=true"};
  const auto exchanged = [](const std::string& name, int64_t world,
                            const std::map<std::string, int64_t>& sizes, const Overrides& more = {},
                            int64_t layers = 4) {
    return DeviceLayout{.name = name,
                        .world = world,
                        .overrides = parallel(sizes, with(kExperts, more)),
                        .exchanged_experts = layers * 4};
  };
  DeviceLayout five_dimensions = exchanged("five_dimensions", 16,
                                           {{"tensor_model", 2},
                                            {"context", 2},
                                            {"pipeline_model", 2},
                                            {"expert_model", 2},
                                            {"expert_tensor", 1}},
                                           with(kSequence, kDouble), /*layers=*/2);
  five_dimensions.tolerance = kContextTolerance;
  return {
      exchanged("ep2", 2, {{"expert_model", 2}}),
      exchanged("ep2_balanced", 2, {{"expert_model", 2}}, balanced),
      exchanged("ep2_capacity", 2, {{"expert_model", 2}}, with(kCapacity, kBiases)),
      exchanged("ep2_recomputed", 2, {{"expert_model", 2}}, with(kRecompute, kPadded)),
      exchanged("ep2_gathered", 2, {{"expert_model", 2}}, with(kGathered, kRecompute)),
      exchanged("ep2_gathered_capacity", 2, {{"expert_model", 2}}, with(kGathered, kCapacity)),
      exchanged("pp2_ep2", 4, {{"pipeline_model", 2}, {"expert_model", 2}}, {}, /*layers=*/2),
      exchanged("tp2_ep2_etp2", 4, {{"tensor_model", 2}, {"expert_model", 2}, {"expert_tensor", 2}},
                kSequence),
      exchanged("ep2_dp4_sharded_params", 4, {{"expert_model", 2}},
                with(with(kSharded, kBiases), {kShardedParams}), /*layers=*/2),
      exchanged("ep2_dp4_sharded_params_recomputed", 4, {{"expert_model", 2}},
                with(with(kSharded, kRecompute), {kShardedParams, "train.precision=bf16"}),
                /*layers=*/2),
      five_dimensions,
  };
}

/// Two ranks on one device, and four on two. Without dp4_sharded_instances: its first sum between
/// instances is in backward, see DeviceRankOptions::ranks_per_device.
inline std::vector<DeviceLayout> shared_layouts() {
  const std::set<std::string> names = {"dp2_overlap", "dp2_sharded", "tp2",     "pp2_zb",
                                       "cp2_p2p",     "ep2",         "pp2_ep2", "pp4_zb"};
  std::vector<DeviceLayout> chosen;
  for (const auto& layouts : {data_layouts(), model_layouts(), exchanged_layouts()})
    for (DeviceLayout layout : layouts) {
      if (!names.contains(layout.name)) continue;
      layout.ranks_per_device = 2;
      chosen.push_back(layout);
    }
  return chosen;
}

}  // namespace lockstep::testing
