#include "lockstep/models/context_parallel_core.h"

#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/models/context_parallel.h"

namespace lockstep {
namespace {

class ContextCoreAttention : public CoreAttention {
 public:
  explicit ContextCoreAttention(ContextParallel context) : context_(std::move(context)) {}

  at::Tensor forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const TokenPositions& /*tokens*/, bool /*training*/) const override {
    return context_attention(query, key, value, context_);
  }

 private:
  ContextParallel context_;
};

}  // namespace

std::shared_ptr<const CoreAttention> make_context_core_attention(const LayerContext& context) {
  return std::make_shared<ContextCoreAttention>(ContextParallel::of(
      context.state, context_communication(context.config, context.parallel, context.layer)));
}

}  // namespace lockstep
