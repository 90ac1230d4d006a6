#include "lockstep/core/tensor_parallel_rules.h"

#include "lockstep/core/check.h"
#include "lockstep/core/expert_rules.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

constexpr const char* kTensor = "parallel.tensor_model_parallel_size";

void check_groups(const TransformerConfig& model, int64_t ranks, const FieldNames& names) {
  const int64_t groups = *model.num_query_groups;
  require<ConfigError>(groups % ranks == 0 || ranks % groups == 0,
                       "{}: found {}, allowed: a multiple or a divisor of {} ({})",
                       names.num_query_groups, groups, kTensor, ranks);
  if (groups >= ranks) return;
  const int64_t sharing = ranks / groups;
  const int64_t rows =
      checked_mul(model.num_attention_heads / groups + 2, *model.kv_channels, names.kv_channels);
  require<ConfigError>(rows % sharing == 0,
                       "{}: found {}, so that a query group has {} rows of linear_qkv, allowed: "
                       "rows that divide by the {} ranks that share a group "
                       "({} / model.num_query_groups)",
                       names.kv_channels, *model.kv_channels, rows, sharing, kTensor);
}

void check_sequence(const TransformerConfig& model, const ParallelConfig& parallel) {
  const int64_t ranks = parallel.tensor_model_parallel_size;
  require<ConfigError>(ranks > 1,
                       "parallel.sequence_parallel: found true, which needs {} > 1 (found {})",
                       kTensor, ranks);
  const int64_t parts =
      checked_mul(ranks, parallel.context_parallel_size,
                  "parallel.tensor_model_parallel_size * parallel.context_parallel_size");
  require<ConfigError>(model.seq_length % parts == 0,
                       "model.seq_length: found {}, allowed with parallel.sequence_parallel: a "
                       "multiple of {} * parallel.context_parallel_size ({})",
                       model.seq_length, kTensor, parts);
}

void check_saved_activations(const TransformerConfig& model, const ParallelConfig& parallel) {
  constexpr const char* kField = "model.distribute_saved_activations: found true, which needs";
  const int64_t ranks = parallel.tensor_model_parallel_size;
  require<ConfigError>(model.recompute_granularity == RecomputeGranularity::full,
                       "{} model.recompute_granularity = full (found {})", kField,
                       to_string(model.recompute_granularity));
  require<ConfigError>(ranks > 1, "{} {} > 1 (found {})", kField, kTensor, ranks);
  require<ConfigError>(!parallel.sequence_parallel,
                       "{} parallel.sequence_parallel = false (found true, which cuts the inputs "
                       "of layers already)",
                       kField);
  div_exact(model.hidden_size, ranks, "model.hidden_size", kTensor);
}

}  // namespace

int64_t padded_vocab_size(int64_t vocab_size, int64_t make_vocab_size_divisible_by,
                          int64_t tensor_parallel) {
  return checked_round_up(
      vocab_size,
      checked_mul(make_vocab_size_divisible_by, tensor_parallel,
                  "model.make_vocab_size_divisible_by * parallel.tensor_model_parallel_size"),
      "padded model.vocab_size");
}

int64_t padded_vocab_size(const TransformerConfig& model, int64_t tensor_parallel) {
  return padded_vocab_size(model.vocab_size, model.make_vocab_size_divisible_by.value_or(1),
                           tensor_parallel);
}

void check_tensor_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                           const FieldNames& names) {
  if (parallel.sequence_parallel) check_sequence(model, parallel);
  if (model.distribute_saved_activations) check_saved_activations(model, parallel);
  const int64_t ranks = parallel.tensor_model_parallel_size;
  require<ConfigError>(!parallel.tp_comm_overlap || ranks > 1,
                       "parallel.tp_comm_overlap: found true, which needs {} > 1 (found {})",
                       kTensor, ranks);
  if (ranks == 1) return;
  div_exact(model.num_attention_heads, ranks, "model.num_attention_heads", kTensor);
  if (has_dense_layers(model))
    div_exact(*model.ffn_hidden_size, ranks, names.ffn_hidden_size, kTensor);
  check_groups(model, ranks, names);
}

}  // namespace lockstep
