#include "lockstep/models/context_parallel_core.h"

#include "lockstep/core/context_parallel_rules.h"
#include "lockstep/models/context_parallel.h"
#include "lockstep/models/input_check.h"

namespace lockstep {
namespace {

class ContextCoreAttention : public CoreAttention {
 public:
  ContextCoreAttention(ContextParallel context, std::optional<int64_t> window)
      : context_(std::move(context)), options_{.window = window} {}

  at::Tensor forward(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                     const TokenPositions& tokens, bool /*training*/) const override {
    if (tokens.documents)
      check_sequence_documents(*tokens.documents, query.size(1),
                               query.size(0) * context_.group.size(), "attention: documents");
    if (!tokens.is_bounded()) return context_attention(query, key, value, context_, options_);
    ContextAttentionOptions options = options_;
    options.bounds = tokens.documents;
    return context_attention(query, key, value, context_, options);
  }

 private:
  ContextParallel context_;
  ContextAttentionOptions options_;
};

}  // namespace

std::shared_ptr<const CoreAttention> make_context_core_attention(const LayerContext& context) {
  const auto communication = context_communication(context.config, context.parallel, context.layer);
  return std::make_shared<ContextCoreAttention>(ContextParallel::of(context.state, communication),
                                                context.config.window_size);
}

}  // namespace lockstep
