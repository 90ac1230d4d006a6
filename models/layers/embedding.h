#pragma once

#include "lockstep/core/parameters.h"
#include "lockstep/models/layers/layer_context.h"

namespace lockstep {

/// One learned vector per token id or per position. Parameter: `weight` [rows, hidden_size], starts
/// as normal values of standard deviation init_method_std.
class EmbeddingTable : public DescribedModule {
 public:
  EmbeddingTable(const LayerContext& context, int64_t rows);

  const at::Tensor& weight() const { return weight_; }

 private:
  at::Tensor weight_;
};

/// Word embedding, plus learned positions where config.position_embedding_type asks for them.
/// Children: `word_embeddings`, `position_embeddings`.
class LanguageModelEmbedding : public DescribedModule {
 public:
  explicit LanguageModelEmbedding(const LayerContext& context);

  /// `tokens` [batch, sequence] of int64 -> [sequence, batch, hidden_size]
  at::Tensor forward(const at::Tensor& tokens) const;

  const at::Tensor& word_embeddings_weight() const { return words_->weight(); }

 private:
  std::shared_ptr<EmbeddingTable> words_;
  std::shared_ptr<EmbeddingTable> positions_;  ///< null without learned positions
};

}  // namespace lockstep
