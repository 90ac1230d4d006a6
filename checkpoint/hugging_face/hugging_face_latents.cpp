#include "lockstep/checkpoint/hugging_face_latents.h"

#include <string>
#include <vector>

#include "lockstep/core/expert_rules.h"

namespace lockstep {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr int64_t kMostDenseLayers = 1 << 20, kMostSharedExperts = 1 << 20;
constexpr double kLatentNormEpsilon = 1e-6;

/// A token chooses among the groups with the largest sum of their two best scores. Lockstep adds up
/// as many scores as the token takes experts of a group.
void parse_groups(const JsonKeys& keys, TransformerConfig& model) {
  const int64_t groups = keys.size("n_group", 8), best = keys.size("topk_group", 4);
  if (groups == 1 || groups == best) return;
  keys.check(model.moe_router_topk % 2 == 0 && model.moe_router_topk / 2 == best,
             "num_experts_per_tok", model.moe_router_topk,
             fmt::format("twice topk_group ({}), where n_group is more than topk_group", best));
  model.moe_router_num_groups = groups;
  model.moe_router_group_topk = best;
}

std::vector<int64_t> parse_first_dense_layers(const JsonKeys& keys, int64_t num_layers) {
  const char* const key = "first_k_dense_replace";
  const auto dense = keys.get<int64_t>(key, 3);
  keys.check(dense >= 0, key, dense, ">= 0");
  if (dense == 0) return {1};
  keys.check(num_layers <= kMostDenseLayers, "num_hidden_layers", num_layers,
             "<= 1048576 beside first_k_dense_replace");
  std::vector<int64_t> list;
  for (int64_t layer = 0; layer < num_layers; ++layer) list.push_back(layer < dense ? 0 : 1);
  return list;
}

}  // namespace

void parse_latent_attention(const JsonKeys& keys, TransformerConfig& model) {
  keys.check(model.num_query_groups == model.num_attention_heads, "num_key_value_heads",
             *model.num_query_groups, model.num_attention_heads);
  keys.allow("rope_interleave", !keys.mentions("rope_interleave"), true);  // null means false
  keys.allow("rms_norm_eps", kLatentNormEpsilon, kLatentNormEpsilon);      // of the latents' norms
  model.multi_latent_attention = true;
  if (keys.has("q_lora_rank") || !keys.mentions("q_lora_rank"))
    model.q_lora_rank = keys.size("q_lora_rank", 1536);
  model.kv_lora_rank = keys.size("kv_lora_rank", 512);
  model.qk_head_dim = keys.size("qk_nope_head_dim", 128);
  model.qk_pos_emb_head_dim = keys.size("qk_rope_head_dim", 64);
  model.v_head_dim = keys.size("v_head_dim", 128);
}

void parse_deepseek_experts(const JsonKeys& keys, TransformerConfig& model) {
  keys.allow<std::string>("scoring_func", "sigmoid", "sigmoid");
  keys.allow<std::string>("topk_method", "noaux_tc", "noaux_tc");
  keys.allow<int64_t>("moe_layer_freq", 1, 1);
  model.moe_router_score_function = RouterScoreFunction::sigmoid;
  model.moe_router_enable_expert_bias = true;
  model.num_experts = keys.size("n_routed_experts", 256);
  model.moe_router_topk = keys.size("num_experts_per_tok", 8);
  parse_groups(keys, model);
  // The weights are normalized to add up to 1; with one expert the weight is the score itself.
  const bool normed = model.moe_router_topk > 1;
  const bool found = keys.get<bool>("norm_topk_prob", !keys.mentions("norm_topk_prob"));
  keys.check(found == normed, "norm_topk_prob", found, normed);
  const int64_t width = keys.size("moe_intermediate_size", 2048);
  const int64_t shared = keys.size("n_shared_experts", 1);
  keys.check(shared <= kMostSharedExperts && width <= INT64_MAX / kMostSharedExperts,
             "n_shared_experts", shared, "<= 1048576, times moe_intermediate_size in 64 bits");
  model.moe_ffn_hidden_size = width;
  model.moe_shared_expert_intermediate_size = shared * width;
  const auto scale = keys.get<double>("routed_scaling_factor", 2.5);
  if (scale != 1) model.moe_router_topk_scaling_factor = scale;
  model.moe_layer_freq = parse_first_dense_layers(keys, model.num_layers);
}

void add_latent_attention(OrderedJson& json, const TransformerConfig& model) {
  json.erase("head_dim");
  json["q_lora_rank"] = nullptr;
  if (model.q_lora_rank) json["q_lora_rank"] = *model.q_lora_rank;
  json["kv_lora_rank"] = model.kv_lora_rank;
  json["qk_nope_head_dim"] = model.qk_head_dim;
  json["qk_rope_head_dim"] = model.qk_pos_emb_head_dim;
  json["v_head_dim"] = model.v_head_dim;
  json["rope_interleave"] = true;
}

void add_deepseek_experts(OrderedJson& json, const TransformerConfig& model) {
  int64_t dense = 0;
  while (dense < model.num_layers && !has_experts(model, dense)) ++dense;
  json["n_routed_experts"] = *model.num_experts;
  json["n_shared_experts"] =
      *model.moe_shared_expert_intermediate_size / *model.moe_ffn_hidden_size;
  json["moe_intermediate_size"] = *model.moe_ffn_hidden_size;
  json["n_group"] = model.moe_router_num_groups.value_or(1);
  json["topk_group"] = model.moe_router_group_topk.value_or(1);
  json["norm_topk_prob"] = model.moe_router_topk > 1;
  json["scoring_func"] = "sigmoid";
  json["topk_method"] = "noaux_tc";
  json["routed_scaling_factor"] = model.moe_router_topk_scaling_factor.value_or(1);
  json["first_k_dense_replace"] = dense;
  json["num_nextn_predict_layers"] = 0;
}

}  // namespace lockstep
