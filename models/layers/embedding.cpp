#include "lockstep/models/layers/embedding.h"

#include <ATen/ATen.h>

#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/models/layers/linear.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

VocabPartition partition_of(const LayerContext& context) {
  const ProcessGroup group = context.tensor_parallel();
  const int64_t rows = padded_vocab_size(context.config.vocab_size,
                                         context.config.make_vocab_size_divisible_by, group.size());
  return vocab_partition(context.config.vocab_size, rows, group.rank(), group.size());
}

ParamDescription table_description(const LayerContext& context, TableUse use) {
  ParamDescription description{.placements = {{MeshAxis::tp, Shard{0}}},
                               .is_embedding_or_output = true,
                               .unpadded_rows = context.config.vocab_size};
  if (use == TableUse::other_stage)
    description.tie = Tie{"word_embeddings", TiedStages::first_and_last};
  return description;
}

}  // namespace

VocabParallelEmbedding::VocabParallelEmbedding(const LayerContext& context, TableUse use)
    : options_{.group = context.tensor_parallel(),
               .input = column_parallel_input(context),
               .weight_used_once = use != TableUse::both_ways,
               .deferred = context.deferred,
               .label = context.name.substr(0, context.name.size() - 1)},
      sequence_parallel_(context.parallel.sequence_parallel),
      partition_(partition_of(context)) {
  const int64_t width = context.config.hidden_size;
  at::Tensor weight = at::zeros({partition_.rows, width}, context.options);
  at::Tensor held = weight.narrow(0, 0, partition_.held);
  fill_normal(held, context.config.init_method_std, context.seed, context.name + "weight",
              {partition_.vocab_size, width}, {partition_.first, 0});
  weight_ = register_described_parameter("weight", weight, table_description(context, use));
}

at::Tensor VocabParallelEmbedding::embed(const at::Tensor& tokens) const {
  const at::Tensor ids = tokens.t().contiguous();
  const ProcessGroup& group = options_.group;
  if (group.size() == 1) return at::embedding(weight_, ids);
  const at::Tensor local = ids - partition_.first;
  const at::Tensor elsewhere = local.lt(0).logical_or_(local.ge(partition_.held));
  const at::Tensor part = at::embedding(weight_, local.masked_fill(elsewhere, 0))
                              .masked_fill(elsewhere.unsqueeze(-1), 0);
  const std::string label = options_.label + " output";
  return sequence_parallel_ ? reduce_scatter_to_group(part, group, 0, label)
                            : reduce_from_group(part, group, label);
}

at::Tensor VocabParallelEmbedding::logits(const at::Tensor& hidden) const {
  return parallel_linear(hidden, weight_, {}, options_);
}

PositionEmbedding::PositionEmbedding(const LayerContext& context)
    : chunk_(SequenceChunk::of(context)) {
  at::Tensor weight =
      at::empty({context.config.seq_length, context.config.hidden_size}, context.options);
  fill_normal(weight, context.config.init_method_std, context.seed, context.name + "weight",
              weight.sizes());
  weight_ = register_described_parameter(
      "weight", weight, {.gradient_states = {{MeshAxis::tp, context.replicated_gradient_state()}}});
}

at::Tensor PositionEmbedding::forward(const TokenPositions& tokens, int64_t rows) const {
  if (!tokens.positions.defined()) return weight_.narrow(0, chunk_.index * rows, rows).unsqueeze(1);
  return at::embedding(weight_, chunk_.positions(tokens, rows).to(weight_.device())).unsqueeze(1);
}

LanguageModelEmbedding::LanguageModelEmbedding(const LayerContext& context, TableUse use)
    : dropout_(context.child("dropout"), context.config.hidden_dropout) {
  words_ = register_module("word_embeddings", std::make_shared<VocabParallelEmbedding>(
                                                  context.child("word_embeddings"), use));
  if (context.config.position_embedding_type == PositionEmbeddingType::learned_absolute)
    positions_ =
        register_module("position_embeddings",
                        std::make_shared<PositionEmbedding>(context.child("position_embeddings")));
}

at::Tensor LanguageModelEmbedding::forward(const at::Tensor& tokens,
                                           const TokenPositions& positions) const {
  at::Tensor hidden = words_->embed(tokens);
  if (positions_) hidden = hidden + positions_->forward(positions, hidden.size(0));
  return dropout_.apply(hidden, positions, is_training());
}

}  // namespace lockstep
