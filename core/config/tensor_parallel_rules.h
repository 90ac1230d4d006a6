#pragma once

#include <cstdint>

#include "lockstep/core/config.h"
#include "lockstep/core/field_names.h"

/// The requirements of tensor and sequence parallelism on a model. Nothing here needs libtorch.
namespace lockstep {

/// Rows of the embedding and output tables over all ranks of tp: `vocab_size` rounded up to a
/// multiple of `make_vocab_size_divisible_by` * `tensor_parallel`. UsageError if it does not fit
/// into 64 bits.
int64_t padded_vocab_size(int64_t vocab_size, int64_t make_vocab_size_divisible_by,
                          int64_t tensor_parallel);

/// The same for `model`; 1 if make_vocab_size_divisible_by is unset, as on the CPU.
int64_t padded_vocab_size(const TransformerConfig& model, int64_t tensor_parallel);

/// ConfigError, naming the fields by `names`, if a resolved `model` cannot be cut over the ranks of
/// tp: query heads, or the ffn_hidden_size of a dense layer, that are not divisible by them; query
/// groups that are neither a multiple nor a divisor of them, or, if they are fewer, whose rows of
/// linear_qkv are not divisible by the ranks that share a group; sequence_parallel or
/// tp_comm_overlap on one rank, or a sequence that is not divisible by the ranks of tp and cp. The
/// vocabulary is always divisible, because it is padded.
void check_tensor_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                           const FieldNames& names);

}  // namespace lockstep
