#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/core/field_names.h"

namespace lockstep {

/// Throws ConfigError, naming the fields by `names`, if the fields of a resolved `model` about
/// heads, latent attention and rotary positions contradict each other.
void check_attention(const TransformerConfig& model, const FieldNames& names);

/// Channels of a query head with multi_latent_attention: qk_head_dim + qk_pos_emb_head_dim.
/// ConfigError if they do not fit into 64 bits.
int64_t latent_query_channels(const TransformerConfig& model);

/// Channels of the query, key and value heads that attention's core gets with
/// multi_latent_attention: the narrower ones are filled up with zeros.
int64_t latent_head_channels(const TransformerConfig& model);

/// Channels of each head that rotary positions rotate. `model` is resolved.
int64_t rotated_channels(const TransformerConfig& model);

/// YaRN's factor for waves that are `factor` times as long: 0.1 weight ln(factor) + 1, and 1 for
/// factors up to 1 (Peng et al., "YaRN", 2023, eq. 22; `weight` is DeepSeek-V2's "mscale").
double yarn_mscale(double factor, double weight);

/// Factor on the cosines and sines of rotary positions: with rope_scaling_type = yarn,
/// yarn_mscale() of rope_mscale over that of rope_mscale_all_dim; otherwise 1.
double rotary_amplitude(const TransformerConfig& model);

/// Factor on all attention logits: with rope_scaling_type = yarn, the square of yarn_mscale() of
/// rope_mscale_all_dim; otherwise 1.
double attention_logit_factor(const TransformerConfig& model);

}  // namespace lockstep
