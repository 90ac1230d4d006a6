#include "lockstep/core/attention_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// Rotary embeddings rotate pairs of channels.
void check_rotated_channels(const TransformerConfig& model, const FieldNames& names) {
  if (model.position_embedding_type != PositionEmbeddingType::rope) return;
  if (model.multi_latent_attention) return;  // see check_latent_attention()
  const int64_t channels = *model.kv_channels;
  const double exact = static_cast<double>(channels) * model.rotary_percent;
  const int64_t rotated = rotated_channels(model);
  const bool whole = std::abs(exact - static_cast<double>(rotated)) < 1e-12 * exact;
  const bool good = rotated >= 2 && rotated % 2 == 0 && whole;
  require<ConfigError>(good || model.rotary_percent != 1,
                       "{}: found {}, allowed with model.position_embedding_type = rope: an even "
                       "number of channels",
                       names.kv_channels, channels);
  require<ConfigError>(good,
                       "model.rotary_percent: found {}, allowed: a share of the {} channels of a "
                       "head that is an even number of channels",
                       model.rotary_percent, channels);
}

/// Refuses a value other than the default in a field that nothing reads.
template <class Value>
void expect_unused(const char* field, const Value& found, const Value& unused,
                   const TransformerConfig& model, const char* allowed) {
  require<ConfigError>(found == unused,
                       "model.{}: found {}, but model.rope_scaling_type is {}; it must be {}",
                       field, found, to_string(model.rope_scaling_type), allowed);
}

void check_unused_rope_fields(const TransformerConfig& model) {
  const TransformerConfig unused;
  const RopeScaling type = model.rope_scaling_type;
  if (type == RopeScaling::none)
    expect_unused("rope_scaling_factor", model.rope_scaling_factor, unused.rope_scaling_factor,
                  model, "linear, llama3 or yarn");
  if (type != RopeScaling::llama3) {
    expect_unused("rope_low_freq_factor", model.rope_low_freq_factor, unused.rope_low_freq_factor,
                  model, "llama3");
    expect_unused("rope_high_freq_factor", model.rope_high_freq_factor,
                  unused.rope_high_freq_factor, model, "llama3");
  }
  if (type == RopeScaling::yarn) return;
  if (type != RopeScaling::llama3)
    expect_unused("rope_original_max_position_embeddings",
                  model.rope_original_max_position_embeddings,
                  unused.rope_original_max_position_embeddings, model, "llama3 or yarn");
  expect_unused("rope_beta_fast", model.rope_beta_fast, unused.rope_beta_fast, model, "yarn");
  expect_unused("rope_beta_slow", model.rope_beta_slow, unused.rope_beta_slow, model, "yarn");
  expect_unused("rope_mscale", model.rope_mscale, unused.rope_mscale, model, "yarn");
  expect_unused("rope_mscale_all_dim", model.rope_mscale_all_dim, unused.rope_mscale_all_dim, model,
                "yarn");
}

void check_rope_scaling(const TransformerConfig& model) {
  const RopeScaling type = model.rope_scaling_type;
  check_unused_rope_fields(model);
  require<ConfigError>(
      type == RopeScaling::none || model.position_embedding_type == PositionEmbeddingType::rope,
      "model.rope_scaling_type: found {}, allowed with model.position_embedding_type = {}: none",
      to_string(type), to_string(model.position_embedding_type));
  require<ConfigError>(model.rope_low_freq_factor < model.rope_high_freq_factor,
                       "model.rope_low_freq_factor: found {}, allowed: < "
                       "model.rope_high_freq_factor ({})",
                       model.rope_low_freq_factor, model.rope_high_freq_factor);
  if (type != RopeScaling::yarn) return;
  require<ConfigError>(model.rope_beta_slow <= model.rope_beta_fast,
                       "model.rope_beta_slow: found {}, allowed: <= model.rope_beta_fast ({})",
                       model.rope_beta_slow, model.rope_beta_fast);
  require<ConfigError>(model.rotary_base > 1,
                       "model.rotary_base: found {}, allowed with model.rope_scaling_type = yarn: "
                       "> 1",
                       model.rotary_base);
}

void check_unused_latent_fields(const TransformerConfig& model) {
  const TransformerConfig unused;
  const auto expect = [](const char* field, int64_t found, int64_t allowed) {
    require<ConfigError>(found == allowed,
                         "model.{}: found {}, which needs model.multi_latent_attention = true",
                         field, found);
  };
  expect("q_lora_rank", model.q_lora_rank.value_or(0), 0);
  expect("kv_lora_rank", model.kv_lora_rank, unused.kv_lora_rank);
  expect("qk_head_dim", model.qk_head_dim, unused.qk_head_dim);
  expect("qk_pos_emb_head_dim", model.qk_pos_emb_head_dim, unused.qk_pos_emb_head_dim);
  expect("v_head_dim", model.v_head_dim, unused.v_head_dim);
}

template <class Value>
void expect_beside_latents(const std::string& field, const Value& found, const Value& allowed) {
  require<ConfigError>(found == allowed,
                       "{}: found {}, allowed with model.multi_latent_attention = true: {}", field,
                       found, allowed);
}

void check_latent_attention(const TransformerConfig& model, const FieldNames& names) {
  if (!model.multi_latent_attention) {
    check_unused_latent_fields(model);
    return;
  }
  expect_beside_latents(names.kv_channels, *model.kv_channels, latent_query_channels(model));
  expect_beside_latents(names.num_query_groups, *model.num_query_groups, model.num_attention_heads);
  expect_beside_latents<std::string>("model.position_embedding_type",
                                     to_string(model.position_embedding_type), "rope");
  expect_beside_latents("model.rotary_percent", model.rotary_percent, 1.0);
  expect_beside_latents("model.add_bias_linear", model.add_bias_linear, false);
  expect_beside_latents("model.add_qkv_bias", model.add_qkv_bias, false);
  require<ConfigError>(model.qk_pos_emb_head_dim % 2 == 0,
                       "model.qk_pos_emb_head_dim: found {}, allowed: an even number of channels",
                       model.qk_pos_emb_head_dim);
}

}  // namespace

int64_t latent_query_channels(const TransformerConfig& model) {
  const int64_t most = std::numeric_limits<int64_t>::max() - model.qk_pos_emb_head_dim;
  require<ConfigError>(model.qk_head_dim <= most,
                       "model.qk_head_dim: found {}, allowed beside model.qk_pos_emb_head_dim "
                       "({}): <= {}",
                       model.qk_head_dim, model.qk_pos_emb_head_dim, most);
  return model.qk_head_dim + model.qk_pos_emb_head_dim;
}

int64_t latent_head_channels(const TransformerConfig& model) {
  return std::max(latent_query_channels(model), model.v_head_dim);
}

int64_t rotated_channels(const TransformerConfig& model) {
  if (model.multi_latent_attention) return model.qk_pos_emb_head_dim;
  return std::llround(static_cast<double>(*model.kv_channels) * model.rotary_percent);
}

double yarn_mscale(double factor, double weight) {
  return factor > 1 ? 0.1 * weight * std::log(factor) + 1 : 1;
}

double rotary_amplitude(const TransformerConfig& model) {
  if (model.rope_scaling_type != RopeScaling::yarn) return 1;
  return yarn_mscale(model.rope_scaling_factor, model.rope_mscale) /
         yarn_mscale(model.rope_scaling_factor, model.rope_mscale_all_dim);
}

double attention_logit_factor(const TransformerConfig& model) {
  if (model.rope_scaling_type != RopeScaling::yarn) return 1;
  const double root = yarn_mscale(model.rope_scaling_factor, model.rope_mscale_all_dim);
  return root * root;
}

void check_attention(const TransformerConfig& model, const FieldNames& names) {
  div_exact(model.num_attention_heads, *model.num_query_groups, "model.num_attention_heads",
            "model.num_query_groups");
  check_latent_attention(model, names);
  check_rotated_channels(model, names);
  check_rope_scaling(model);
}

}  // namespace lockstep
