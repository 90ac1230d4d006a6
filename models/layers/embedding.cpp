#include "lockstep/models/embedding.h"

#include <limits>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lockstep/core/check.h"
#include "lockstep/core/narrow_dtype.h"
#include "lockstep/core/planned_cpu.h"
#include "lockstep/core/tensor_parallel_rules.h"
#include "lockstep/models/cross_entropy.h"
#include "lockstep/models/input_check.h"
#include "lockstep/models/layer_params.h"
#include "lockstep/models/linear.h"
#include "lockstep/models/linear_cross_entropy.h"
#include "lockstep/models/weight_gradient.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

VocabPartition partition_of(const ProcessGroup& group, const ParamSpec& table) {
  return vocab_partition(*table.description.unpadded_rows, table.shape[0], group.rank(),
                         group.size());
}

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

/// at::embedding() of a narrow table on the CPU. Libtorch's backward rounds a row's sum after each
/// addition: 4,096 ones in bf16 are 256 then. index_add_ rounds once.
struct NarrowLookup : torch::autograd::Function<NarrowLookup> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& table,
                            const at::Tensor& ids) {
    context->save_for_backward({ids});
    context->saved_data["shape"] = table.sizes().vec();
    return at::embedding(table, ids);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const at::Tensor ids = context->get_saved_variables()[0].flatten().to(at::kLong);
    const at::Tensor rows = as_matrix(grads[0]);
    const auto shape = context->saved_data["shape"].toIntVector();
    return {at::zeros(shape, rows.options()).index_add_(0, ids, rows), at::Tensor()};
  }
};

/// Rows `ids` of `table`.
at::Tensor look_up(const at::Tensor& table, const at::Tensor& ids) {
  const bool on_cpu = table.is_cpu() || (table.is_meta() && plans_cpu());
  if (on_cpu && is_narrow(table.scalar_type())) return NarrowLookup::apply(table, ids);
  return at::embedding(table, ids);
}

}  // namespace

VocabParallelEmbedding::VocabParallelEmbedding(const ParallelContext& context,
                                               const ModuleSpec& spec, TableUse use)
    : options_{.group = context.tensor_parallel(),
               .input = column_parallel_input(context),
               .overlap = context.tp_comm_overlap,
               .weight_used_once = use != TableUse::both_ways,
               .deferred = context.deferred,
               .label = context.label()},
      sequence_parallel_(context.sequence_parallel),
      partition_(partition_of(options_.group, spec.at("weight"))) {
  weight_ = add(spec.at("weight"), context.origin());
}

VocabParallelEmbedding::VocabParallelEmbedding(const ParallelContext& context, int64_t vocab_size,
                                               int64_t width, double init_std, TableUse use)
    : VocabParallelEmbedding(
          context,
          vocab_parallel_embedding_params(
              vocab_size, padded_vocab_size(vocab_size, 1, context.tensor_parallel().size()), width,
              init_std, use),
          use) {}

VocabParallelEmbedding::VocabParallelEmbedding(const LayerContext& context, TableUse use)
    : VocabParallelEmbedding(context, vocab_parallel_embedding_params(context.settings(), use),
                             use) {}

at::Tensor VocabParallelEmbedding::embed(const at::Tensor& tokens) const {
  require<UsageError>(tokens.defined() && tokens.dim() == 2 &&
                          (tokens.scalar_type() == at::kLong || tokens.scalar_type() == at::kInt),
                      "{}: found tokens {}, allowed: [batch, sequence] of Long, or of Int",
                      options_.label.layer(), form_of(tokens));
  const at::Tensor ids = tokens.t().contiguous();
  const ProcessGroup& group = options_.group;
  if (group.size() == 1) return look_up(weight_, ids);
  const at::Tensor local = ids - partition_.first;
  const at::Tensor elsewhere = local.lt(0).logical_or_(local.ge(partition_.held));
  at::Tensor part =
      look_up(weight_, local.masked_fill(elsewhere, 0)).masked_fill(elsewhere.unsqueeze(-1), 0);
  if (!ids.is_cpu())  // where nobody has looked at them
    part = part.masked_fill(ids.lt(0).logical_or_(ids.ge(partition_.vocab_size)).unsqueeze(-1),
                            std::numeric_limits<double>::quiet_NaN());
  const std::string& label = options_.label.output();
  return sequence_parallel_ ? reduce_scatter_to_group(part, group, 0, label)
                            : reduce_from_group(part, group, label);
}

at::Tensor VocabParallelEmbedding::logits(const at::Tensor& hidden) const {
  return parallel_linear(hidden, weight_, {}, options_);
}

at::Tensor VocabParallelEmbedding::losses(const at::Tensor& hidden, const at::Tensor& labels,
                                          std::optional<int64_t> chunk_size,
                                          double label_smoothing) const {
  if (chunk_size)
    return parallel_linear_cross_entropy(hidden, weight_, labels, partition_, options_, *chunk_size,
                                         label_smoothing);
  return vocab_parallel_cross_entropy(logits(hidden).flatten(0, -2), labels, partition_,
                                      options_.group, label_smoothing, LogitsMemory::taken);
}

at::Tensor VocabParallelEmbedding::cross_entropy(const at::Tensor& logits,
                                                 const at::Tensor& labels) const {
  require<UsageError>(logits.defined() && logits.dim() >= 1 && logits.size(-1) == partition_.rows &&
                          at::isFloatingType(logits.scalar_type()),
                      "{}: found logits {}, allowed: [..., {}] of a floating-point dtype",
                      options_.label.layer(), form_of(logits), partition_.rows);
  const at::IntArrayRef tokens = logits.sizes().slice(0, static_cast<size_t>(logits.dim() - 1));
  require<UsageError>(labels.sizes() == tokens,
                      "{}: labels of shape {}, allowed: {}, that of the logits without their last "
                      "dimension",
                      options_.label.layer(), fmt::join(labels.sizes(), " x "),
                      fmt::join(tokens, " x "));
  require<UsageError>(labels.scalar_type() == at::kLong,
                      "{}: found labels {}, allowed: [{}] of Long", options_.label.layer(),
                      form_of(labels), fmt::join(tokens, ", "));
  return vocab_parallel_cross_entropy(logits.flatten(0, -2), labels.flatten(), partition_,
                                      options_.group);
}

PositionEmbedding::PositionEmbedding(const LayerContext& context, const ModuleSpec& spec)
    : chunk_(SequenceChunk::of(context)) {
  weight_ = add(spec.at("weight"), context.origin());
}

PositionEmbedding::PositionEmbedding(const LayerContext& context)
    : PositionEmbedding(context, position_embedding_params(context.settings())) {}

at::Tensor PositionEmbedding::forward(const TokenPositions& tokens, int64_t rows) const {
  if (!tokens.embedded().defined())
    return weight_.narrow(0, chunk_.index * rows, rows).unsqueeze(1);
  if (!tokens.document_positions.defined())
    return look_up(weight_, chunk_.positions(tokens, rows, weight_.device())).unsqueeze(1);
  const at::Tensor own = tokens.document_positions.narrow(0, chunk_.index * rows, rows);
  return look_up(weight_, own.to(weight_.device()));
}

LanguageModelEmbedding::LanguageModelEmbedding(const LayerContext& context, const ModuleSpec& spec,
                                               TableUse use)
    : dropout_(context.child("dropout"), context.config.hidden_dropout) {
  words_ = add_child<VocabParallelEmbedding>(context, spec, "word_embeddings", use);
  if (context.config.position_embedding_type == PositionEmbeddingType::learned_absolute)
    positions_ = add_child<PositionEmbedding>(context, spec, "position_embeddings");
}

LanguageModelEmbedding::LanguageModelEmbedding(const LayerContext& context, TableUse use)
    : LanguageModelEmbedding(context, language_model_embedding_params(context.settings(), use),
                             use) {}

at::Tensor LanguageModelEmbedding::forward(const at::Tensor& tokens,
                                           const TokenPositions& positions) const {
  at::Tensor hidden = words_->embed(tokens);
  if (positions_) hidden = hidden + positions_->forward(positions, hidden.size(0));
  return dropout_.apply(hidden, positions, is_training());
}

}  // namespace lockstep
