#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"

namespace lockstep {

/// Pieces in which full recomputation runs the layers of a pipeline stage, or of a chunk of one, as
/// in Megatron Core's recompute_method: how many layers each has, from the first of the
/// `num_layers` layers on. Only the input of a piece is kept. Layers after the last piece keep
/// their activations. With block a piece is one layer; with uniform the pieces cover all layers,
/// and the last one takes what is left. Empty without full recomputation. `model` is resolved.
std::vector<int64_t> recomputed_pieces(const TransformerConfig& model, int64_t num_layers);

}  // namespace lockstep
