#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/program/megatron_settings.h"

namespace lockstep {

/// Sets the fields that follow from several flags, or from one by arithmetic, and notes what could
/// not be kept. ConfigError naming flags that exclude each other.
void apply_megatron_rules(MegatronSettings& settings);

/// The part of it that sets the fields of --bf16, --fp16 and --fp8-format.
void apply_precision(MegatronSettings& settings);

/// The part of it that sets batch sizes, and the fields that count iterations from samples.
void apply_batches(MegatronSettings& settings);

/// The layers that --moe-layer-freq lists, as in ([0]*1+[1]*26); lists, +, * and parentheses.
/// ConfigError naming the flag if it is not such an expression.
std::vector<int64_t> evaluate_layer_list(const std::string& expression);

}  // namespace lockstep
