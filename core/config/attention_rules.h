#pragma once

#include "lockstep/core/config.h"
#include "lockstep/core/field_names.h"

namespace lockstep {

/// Throws ConfigError, naming the fields by `names`, if those of the heads and of rotary positions
/// in `model`, resolved, contradict each other.
void check_attention(const TransformerConfig& model, const FieldNames& names);

}  // namespace lockstep
