#pragma once

// Internal.

#include <memory>

#include "lockstep/models/core_attention.h"

namespace lockstep {

/// Causal attention over sequences that are cut over cp, by parallel.cp_comm_type: see
/// context_attention().
std::shared_ptr<const CoreAttention> make_context_core_attention(const LayerContext& context);

}  // namespace lockstep
