#pragma once

// Internal: what config.json says about DeepSeek-V3's layers.

#include <nlohmann/json.hpp>

#include "lockstep/checkpoint/json_keys.h"
#include "lockstep/core/config.h"

namespace lockstep {

/// Reads the sizes of latent attention. model.num_query_groups must be set. FileError.
void parse_latent_attention(const JsonKeys& keys, TransformerConfig& model);

/// Reads the experts and their router. model.num_layers must be set. FileError.
void parse_deepseek_experts(const JsonKeys& keys, TransformerConfig& model);

/// Adds what the functions above read, for a model of the family. Removes head_dim, which is a
/// different width there.
void add_latent_attention(nlohmann::ordered_json& json, const TransformerConfig& model);
void add_deepseek_experts(nlohmann::ordered_json& json, const TransformerConfig& model);

}  // namespace lockstep
