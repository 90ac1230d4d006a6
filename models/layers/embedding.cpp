#include "lockstep/models/layers/embedding.h"

#include <ATen/ATen.h>

namespace lockstep {

EmbeddingTable::EmbeddingTable(const LayerContext& context, int64_t rows) {
  at::Tensor weight = at::empty({rows, context.config.hidden_size}, context.options);
  fill_normal(weight, context.config.init_method_std, context.seed, context.name + "weight",
              weight.sizes());
  weight_ = register_described_parameter("weight", weight, {});
}

LanguageModelEmbedding::LanguageModelEmbedding(const LayerContext& context) {
  const auto table = [&](const std::string& name, int64_t rows) {
    return register_module(name, std::make_shared<EmbeddingTable>(context.child(name), rows));
  };
  words_ = table("word_embeddings", context.config.vocab_size);
  if (context.config.position_embedding_type == PositionEmbeddingType::learned_absolute)
    positions_ = table("position_embeddings", context.config.seq_length);
}

at::Tensor LanguageModelEmbedding::forward(const at::Tensor& tokens) const {
  const at::Tensor words = at::embedding(words_->weight(), tokens.t().contiguous());
  if (!positions_) return words;
  return words + positions_->weight().slice(0, 0, tokens.size(1)).unsqueeze(1);
}

}  // namespace lockstep
