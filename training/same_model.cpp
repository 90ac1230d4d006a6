#include "lockstep/training/same_model.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "lockstep/core/check.h"
#include "lockstep/core/config_io.h"

namespace lockstep {
namespace {

/// Fields that change what weights of the same shapes compute.
constexpr const char* kSameInBoth[] = {"model.num_attention_heads",
                                       "model.num_query_groups",
                                       "model.kv_channels",
                                       "model.normalization",
                                       "model.layernorm_epsilon",
                                       "model.position_embedding_type",
                                       "model.rotary_base",
                                       "model.rotary_percent",
                                       "model.rope_scaling_type",
                                       "model.rope_scaling_factor",
                                       "model.rope_low_freq_factor",
                                       "model.rope_high_freq_factor",
                                       "model.rope_original_max_position_embeddings",
                                       "model.rope_beta_fast",
                                       "model.rope_beta_slow",
                                       "model.rope_mscale",
                                       "model.rope_mscale_all_dim",
                                       "model.qk_head_dim",
                                       "model.qk_pos_emb_head_dim",
                                       "model.v_head_dim",
                                       "model.window_size",
                                       "model.activation",
                                       "model.moe_router_topk",
                                       "model.moe_router_score_function",
                                       "model.moe_router_pre_softmax",
                                       "model.moe_router_num_groups",
                                       "model.moe_router_group_topk",
                                       "model.moe_router_topk_scaling_factor",
                                       "lora.alpha"};

/// Fields that change the shapes of the weights.
constexpr const char* kSameShapes[] = {"model.num_layers",
                                       "model.hidden_size",
                                       "model.ffn_hidden_size",
                                       "model.num_experts",
                                       "model.multi_latent_attention",
                                       "model.kv_lora_rank",
                                       "lora.rank",
                                       "lora.target_modules"};

template <size_t N>
bool is_one_of(const char* const (&paths)[N], const std::string& path) {
  return std::find(std::begin(paths), std::end(paths), path) != std::end(paths);
}

/// Their order changes nothing.
void sort_targets(LoraConfig& lora) {
  std::sort(lora.target_modules.begin(), lora.target_modules.end());
}

}  // namespace

void check_same_model(CheckpointReader& checkpoint, const Config& config, bool starts_adapters) {
  Config of_checkpoint = checkpoint.config();
  Config mine = config;
  if (starts_adapters) mine.lora = of_checkpoint.lora;
  sort_targets(mine.lora);
  sort_targets(of_checkpoint.lora);
  // Earlier versions saved settings of experts with models that have none.
  const bool dense = !of_checkpoint.model.num_experts && !mine.model.num_experts;
  const auto is_unread = [dense](const std::string& path) {
    return dense && path.starts_with("model.moe_");
  };
  const std::vector<ConfigValue> saved = config_values(of_checkpoint);
  const std::vector<ConfigValue> found = config_values(mine);
  for (size_t i = 0; i < found.size(); ++i) {
    if (found[i] == saved[i] || is_unread(found[i].path)) continue;
    const bool shapes = is_one_of(kSameShapes, found[i].path);
    require<ConfigError>(!shapes && !is_one_of(kSameInBoth, found[i].path),
                         "{}: found {}, allowed: {}, as in the run that saved '{}'{}",
                         found[i].path, found[i].value, saved[i].value, checkpoint.path(),
                         shapes ? "" : ", or another one with checkpoint.finetune = true");
  }
}

}  // namespace lockstep
