#include <gtest/gtest.h>

#include "lockstep/core/config_io.h"
#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/core/error.h"
#include "lockstep/core/expert_rules.h"

namespace lockstep {
namespace {

/// The message with which a configuration of these fields is refused, "" if it is accepted.
std::string refusal(const std::vector<std::string>& overrides) {
  try {
    parse_config("", "x", overrides);
    return "";
  } catch (const ConfigError& error) {
    return error.what();
  }
}

void expect_refusal(const std::vector<std::string>& overrides, const std::string& start) {
  const std::string message = refusal(overrides);
  EXPECT_EQ(message.substr(0, start.size()), start) << message;
}

using Overrides = std::vector<std::string>;

Overrides with(const Overrides& first, const Overrides& more) {
  Overrides all = first;
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

TEST(ContextParallelRules, WhatCanBeCut) {
  const Overrides two = {"parallel.context_parallel_size=2"};
  EXPECT_EQ(refusal(two), "");
  EXPECT_EQ(refusal(with(two, {"model.seq_length=12"})), "");
  expect_refusal(with(two, {"model.seq_length=10"}),
                 "model.seq_length: found 10, allowed: a multiple of 2 * "
                 "parallel.context_parallel_size (4)");
  expect_refusal(with(two, {"model.attention_dropout=0.1"}), "model.attention_dropout: found 0.1");
  expect_refusal(with(two, {"parallel.pipeline_schedule=zb-h1"}),
                 "parallel.pipeline_schedule: found zb-h1, allowed with "
                 "parallel.context_parallel_size > 1");
  expect_refusal(with(two, {"model.num_query_groups=1", "parallel.cp_comm_type=a2a"}),
                 "model.num_query_groups: found 1, which leaves 1 on a tensor-parallel rank, "
                 "allowed with parallel.cp_comm_type = a2a: a multiple of the 2 ranks");
  EXPECT_EQ(refusal(with(two, {"model.num_query_groups=1", "parallel.cp_comm_type=all_gather"})),
            "");
}

TEST(ContextParallelRules, EachLayerHasItsCommunication) {
  using enum ContextCommunication;
  const auto of_layers = [](const std::string& text) {
    return Overrides{"parallel.context_parallel_size=2", "model.num_layers=3",
                     "parallel.cp_comm_type_of_layers=" + text};
  };
  const Config config = parse_config("", "x", of_layers("a2a, p2p,all_gather"));
  for (const auto& [layer, expected] : {std::pair{0, a2a}, {1, p2p}, {2, all_gather}})
    EXPECT_EQ(context_communication(config.model, config.parallel, layer), expected);
  const Config alike = parse_config("", "x", {"parallel.cp_comm_type=all_gather"});
  EXPECT_EQ(context_communication(alike.model, alike.parallel, 1), all_gather);
  for (const auto& bad : {"", "p2p", "p2p,p2p,p2p,p2p", "p2p,p2p,ring", "p2p,p2p,", "p2p,,p2p,p2p"})
    expect_refusal(of_layers(bad), std::string("parallel.cp_comm_type_of_layers: found '") + bad +
                                       "', allowed: one of p2p, all_gather, a2a, a2a+p2p for each "
                                       "of the 3 layers");
  expect_refusal(with(of_layers("p2p,a2a,p2p"), {"model.num_query_groups=1"}),
                 "model.num_query_groups: found 1, which leaves 1 on a tensor-parallel rank, "
                 "allowed with parallel.cp_comm_type = a2a: a multiple of the 2 ranks");
  expect_refusal(of_layers("p2p,a2a+p2p,p2p"),
                 "parallel.hierarchical_context_parallel_sizes: not set");
}

TEST(ContextParallelRules, Levels) {
  const Overrides four = {"parallel.context_parallel_size=4"};
  const std::string field = "parallel.hierarchical_context_parallel_sizes";
  const Overrides both = with(four, {"parallel.cp_comm_type=a2a+p2p"});
  expect_refusal(both, field + ": not set; cp_comm_type = a2a+p2p needs it");
  expect_refusal(with(four, {field + "=2,2"}),
                 field + ": set; only cp_comm_type = a2a+p2p uses it");
  for (const auto& bad : {"2", "2,2,1", "2,3", "4,2", "0,4", "-2,-2", "2;2", "2,2,", "a,b"})
    expect_refusal(with(both, {field + "=" + bad}), field + ": found '" + bad + "'");
  const Config config = parse_config("", "x", with(both, {field + "=2, 2"}));
  EXPECT_EQ(context_parallel_levels(config.parallel), (std::vector<int64_t>{2, 2}));
  EXPECT_TRUE(context_parallel_levels(ParallelConfig{}).empty());
}

TEST(ExpertRules, Router) {
  expect_refusal({"parallel.expert_model_parallel_size=2"},
                 "parallel.expert_model_parallel_size: found 2, allowed without model.num_experts");
  const Overrides experts = {"model.num_experts=8"};
  EXPECT_EQ(refusal(experts), "");
  const auto refused = [&](const Overrides& more, const std::string& start) {
    expect_refusal(with(experts, more), start);
  };
  refused({"model.moe_router_topk=9"}, "model.moe_router_topk: found 9, allowed: <= ");
  refused({"model.moe_router_topk=1"}, "model.moe_router_pre_softmax: found false");
  EXPECT_EQ(
      refusal(with(experts, {"model.moe_router_topk=1", "model.moe_router_pre_softmax=true"})), "");
  refused({"model.moe_router_enable_expert_bias=true"},
          "model.moe_router_enable_expert_bias: found true");
  refused({"model.moe_router_load_balancing_type=none", "model.moe_aux_loss_coeff=0.1"},
          "model.moe_aux_loss_coeff: found 0.1");
  refused({"model.moe_pad_expert_input_to_capacity=true"},
          "model.moe_pad_expert_input_to_capacity: found true");
  refused({"parallel.pipeline_schedule=zb-h1"},
          "parallel.pipeline_schedule: found zb-h1, allowed with model.num_experts");
  refused({"model.moe_router_num_groups=4"}, "model.moe_router_group_topk: is not set");
  refused({"model.moe_router_num_groups=3", "model.moe_router_group_topk=1"},
          "model.num_experts (8) must be divisible by model.moe_router_num_groups (3)");
  refused({"model.moe_router_num_groups=4", "model.moe_router_group_topk=5"},
          "model.moe_router_group_topk: found 5");
  refused({"model.moe_router_num_groups=8", "model.moe_router_group_topk=1"},
          "model.moe_router_topk: found 2");
  EXPECT_EQ(
      refusal(with(experts, {"model.moe_router_num_groups=4", "model.moe_router_group_topk=2"})),
      "");
}

TEST(ExpertRules, Layout) {
  const Overrides experts = {"model.num_experts=8", "model.moe_ffn_hidden_size=30"};
  EXPECT_EQ(refusal(with(experts, {"parallel.expert_model_parallel_size=4",
                                   "parallel.expert_tensor_parallel_size=3"})),
            "");
  const auto refused = [&](const Overrides& more, const std::string& start) {
    expect_refusal(with(experts, more), start);
  };
  refused({"parallel.expert_model_parallel_size=3"},
          "model.num_experts (8) must be divisible by parallel.expert_model_parallel_size (3)");
  refused({"parallel.expert_tensor_parallel_size=4"},
          "model.moe_ffn_hidden_size (30) must be divisible by "
          "parallel.expert_tensor_parallel_size (4)");
  refused({"parallel.tensor_model_parallel_size=2", "model.moe_shared_expert_intermediate_size=3"},
          "model.moe_shared_expert_intermediate_size (3) must be divisible by");
  refused({"parallel.tensor_model_parallel_size=2", "model.seq_length=15"},
          "model.seq_length: found 15, allowed with model.num_experts");
  EXPECT_EQ(*parse_config("", "x", {"model.num_experts=8"}).model.moe_ffn_hidden_size, 512);
}

TEST(ExpertRules, LayersInBetweenAreDense) {
  TransformerConfig config;
  config.num_experts = 4;
  config.moe_layer_freq = {3};
  EXPECT_TRUE(has_experts(config, 0));
  EXPECT_FALSE(has_experts(config, 1));
  EXPECT_FALSE(has_experts(config, 2));
  EXPECT_TRUE(has_experts(config, 3));
  config.moe_layer_freq = {0, 1, 0, 1};
  for (const int64_t layer : {0, 1, 2, 3}) EXPECT_EQ(has_experts(config, layer), layer % 2 == 1);
  config.moe_layer_freq = {0};
  EXPECT_FALSE(has_experts(config, 0));
  config.moe_layer_freq = {1};
  config.num_experts.reset();
  EXPECT_FALSE(has_experts(config, 0));
}

}  // namespace
}  // namespace lockstep
