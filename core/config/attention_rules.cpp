#include "lockstep/core/attention_rules.h"

#include <cmath>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// Rotary embeddings turn pairs of channels.
void check_rotated_channels(const TransformerConfig& model, const FieldNames& names) {
  if (model.position_embedding_type != PositionEmbeddingType::rope) return;
  const int64_t channels = *model.kv_channels;
  const double rotated = static_cast<double>(channels) * model.rotary_percent;
  const bool good =
      rotated >= 2 && std::floor(rotated) == rotated && static_cast<int64_t>(rotated) % 2 == 0;
  require<ConfigError>(good || model.rotary_percent != 1,
                       "{}: found {}, allowed with model.position_embedding_type = rope: an even "
                       "number of channels",
                       names.kv_channels, channels);
  require<ConfigError>(good,
                       "model.rotary_percent: found {}, allowed: a share of the {} channels of a "
                       "head that is an even number of channels",
                       model.rotary_percent, channels);
}

/// A field that has another value than its default although nothing reads it.
template <class Value>
void expect_unused(const char* field, const Value& found, const Value& unused,
                   const TransformerConfig& model, const char* allowed) {
  require<ConfigError>(found == unused,
                       "model.{}: found {}, but model.rope_scaling_type is {}; allowed with: {}",
                       field, found, to_string(model.rope_scaling_type), allowed);
}

void check_rope_scaling(const TransformerConfig& model) {
  const TransformerConfig unused;
  const RopeScaling type = model.rope_scaling_type;
  if (type == RopeScaling::none)
    expect_unused("rope_scaling_factor", model.rope_scaling_factor, unused.rope_scaling_factor,
                  model, "linear, llama3");
  if (type != RopeScaling::llama3) {
    expect_unused("rope_low_freq_factor", model.rope_low_freq_factor, unused.rope_low_freq_factor,
                  model, "llama3");
    expect_unused("rope_high_freq_factor", model.rope_high_freq_factor,
                  unused.rope_high_freq_factor, model, "llama3");
    expect_unused("rope_original_max_position_embeddings",
                  model.rope_original_max_position_embeddings,
                  unused.rope_original_max_position_embeddings, model, "llama3");
  }
  require<ConfigError>(
      type == RopeScaling::none || model.position_embedding_type == PositionEmbeddingType::rope,
      "model.rope_scaling_type: found {}, allowed with model.position_embedding_type = {}: none",
      to_string(type), to_string(model.position_embedding_type));
  require<ConfigError>(model.rope_low_freq_factor < model.rope_high_freq_factor,
                       "model.rope_low_freq_factor: found {}, allowed: < "
                       "model.rope_high_freq_factor ({})",
                       model.rope_low_freq_factor, model.rope_high_freq_factor);
}

}  // namespace

void check_attention(const TransformerConfig& model, const FieldNames& names) {
  div_exact(model.num_attention_heads, *model.num_query_groups, "model.num_attention_heads",
            "model.num_query_groups");
  check_rotated_channels(model, names);
  check_rope_scaling(model);
}

}  // namespace lockstep
