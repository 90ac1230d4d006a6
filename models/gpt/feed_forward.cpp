#include "lockstep/models/feed_forward.h"

#include "lockstep/core/expert_rules.h"
#include "lockstep/models/moe_layer.h"

namespace lockstep {

std::shared_ptr<FeedForward> feed_forward_from(const LayerContext& context,
                                               const ModuleSpec& spec) {
  if (has_experts(context.config, context.layer)) return std::make_shared<MoELayer>(context, spec);
  return std::make_shared<MLP>(context, spec);
}

std::shared_ptr<FeedForward> make_feed_forward(const LayerContext& context) {
  return feed_forward_from(context, feed_forward_params(context.settings()));
}

}  // namespace lockstep
