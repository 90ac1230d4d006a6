#pragma once

#include <memory>
#include <optional>

#include "lockstep/core/parameters.h"
#include "lockstep/models/dropout.h"
#include "lockstep/models/layer_context.h"
#include "lockstep/models/linear_function.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/models/token_positions.h"
#include "lockstep/models/vocab_partition.h"

namespace lockstep {

/// One learned vector per token id, for looking tokens up or for scoring them. Parameter: `weight`
/// [rows / ranks, width], with the rows cut over tp: one row per token id, then padding, which is
/// zero and stays zero. The other rows start with normal values, the same on every layout.
class VocabParallelEmbedding : public DescribedModule {
 public:
  /// Rows are padded to a multiple of the number of tp ranks. `init_std`: standard deviation of the
  /// initial values.
  VocabParallelEmbedding(const ParallelContext& context, int64_t vocab_size, int64_t width,
                         double init_std, TableUse use);
  /// By config: vocab_size with padded_vocab_size(), hidden_size, init_method_std.
  VocabParallelEmbedding(const LayerContext& context, TableUse use);
  /// `spec` as vocab_parallel_embedding_params() returns it.
  VocabParallelEmbedding(const ParallelContext& context, const ModuleSpec& spec, TableUse use);

  /// `tokens` [batch, sequence] of int64 -> [sequence, batch, width], by an all-reduce of the
  /// ranks' parts; with sequence parallelism this rank's [sequence / ranks, ...], by a
  /// reduce-scatter. Over several ranks an id outside the vocabulary gives zeros on the CPU and NaN
  /// on a device; check_token_ids() finds such ids, and GPTModel calls it. UsageError, naming the
  /// layer: tokens with another number of dimensions, or a dtype other than int64 and int32.
  ///
  /// In bf16 and fp16 the CPU adds up the gradient of a row in fp32 and rounds it once. On CUDA
  /// libtorch does so for more than 3,072 tokens; for fewer it rounds after each group of tokens.
  at::Tensor embed(const at::Tensor& tokens) const;

  /// `hidden` [sequence, batch, width], the same on all ranks of tp, or with sequence
  /// parallelism this rank's [sequence / ranks, ...] -> the logits of this rank's rows [sequence,
  /// batch, rows / ranks]. Collectives: those of parallel_linear().
  at::Tensor logits(const at::Tensor& hidden) const;

  /// The losses of logits() [sequence, batch, rows / ranks] for `labels` [sequence, batch] of int64
  /// (note that embed() takes [batch, sequence]): -log of the label's probability, [sequence *
  /// batch]; see vocab_parallel_cross_entropy(). UsageError, naming the layer: logits of another
  /// width, labels of another shape or dtype.
  at::Tensor cross_entropy(const at::Tensor& logits, const at::Tensor& labels) const;

  /// The losses [tokens] of logits(hidden) for `labels` [tokens] of int64, in the order of the
  /// flattened `hidden`. With `chunk_size`, that many tokens are processed at a time, otherwise all
  /// at once; see parallel_linear_cross_entropy().
  at::Tensor losses(const at::Tensor& hidden, const at::Tensor& labels,
                    std::optional<int64_t> chunk_size, double label_smoothing) const;

  const at::Tensor& weight() const { return weight_; }
  /// Which rows this rank has.
  const VocabPartition& partition() const { return partition_; }

 private:
  ParallelLinearOptions options_;
  bool sequence_parallel_;
  VocabPartition partition_;
  at::Tensor weight_;
};

/// One learned vector per position. Parameter: `weight` [seq_length, hidden_size], held by every
/// rank; it starts with normal values of standard deviation init_method_std.
class PositionEmbedding : public DescribedModule {
 public:
  explicit PositionEmbedding(const LayerContext& context);
  /// `spec` as position_embedding_params() returns it.
  PositionEmbedding(const LayerContext& context, const ModuleSpec& spec);

  /// The vectors of the `rows` tokens that this rank has between the tensor-parallel regions:
  /// [rows, 1, hidden_size], or with document_positions [rows, batch, hidden_size].
  at::Tensor forward(const TokenPositions& tokens, int64_t rows) const;

 private:
  SequenceChunk chunk_;
  at::Tensor weight_;
};

/// Word embedding, plus learned positions if config.position_embedding_type asks for them, followed
/// by dropout. Children: `word_embeddings`, `position_embeddings`.
class LanguageModelEmbedding : public DescribedModule {
 public:
  LanguageModelEmbedding(const LayerContext& context, TableUse use);
  /// `spec` as language_model_embedding_params() returns it.
  LanguageModelEmbedding(const LayerContext& context, const ModuleSpec& spec, TableUse use);

  /// `tokens` [batch, sequence] of int64 -> [sequence, batch, hidden_size], with sequence
  /// parallelism this rank's [sequence / ranks, ...]
  at::Tensor forward(const at::Tensor& tokens, const TokenPositions& positions) const;

  const std::shared_ptr<VocabParallelEmbedding>& word_embeddings() const { return words_; }

 private:
  std::shared_ptr<VocabParallelEmbedding> words_;
  std::shared_ptr<PositionEmbedding> positions_;  ///< null without learned positions
  Dropout dropout_;
};

}  // namespace lockstep
