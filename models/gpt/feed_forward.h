#pragma once

#include <memory>

#include "lockstep/models/mlp.h"

namespace lockstep {

/// The feed-forward network of layer context.layer: an MLP, or a MoELayer.
std::shared_ptr<FeedForward> make_feed_forward(const LayerContext& context);
/// `spec` as feed_forward_params() returns it.
std::shared_ptr<FeedForward> feed_forward_from(const LayerContext& context, const ModuleSpec& spec);

}  // namespace lockstep
