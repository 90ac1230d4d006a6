#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/core/field_names.h"

namespace lockstep {

/// Whether layer `layer`, from 0 over the whole model, has experts, by num_experts and
/// moe_layer_freq of `model`, which is valid.
bool has_experts(const TransformerConfig& model, int64_t layer);

/// Whether some layer has a feed-forward block of ffn_hidden_size instead of experts.
bool has_dense_layers(const TransformerConfig& model);

/// Throws ConfigError, naming the fields by `names`, if the fields of a resolved `model` and of
/// `parallel` that concern experts contradict each other.
void check_experts(const TransformerConfig& model, const ParallelConfig& parallel,
                   const FieldNames& names);

/// Throws ConfigError, naming the field, if a setting of experts in a resolved `model` has no
/// effect: a moe_ field other than its default without num_experts, or num_experts where
/// moe_layer_freq gives no layer experts. Earlier versions trained such models, so check_experts()
/// accepts them.
void check_experts_in_use(const TransformerConfig& model);

}  // namespace lockstep
