#pragma once

#include <cstdint>
#include <vector>

#include "lockstep/core/config.h"
#include "lockstep/core/field_names.h"

namespace lockstep {

/// Throws ConfigError, naming the fields by `names`, if a resolved `model` cannot be cut over the
/// context-parallel ranks as `parallel` says.
void check_context_parallel(const TransformerConfig& model, const ParallelConfig& parallel,
                            const FieldNames& names);

/// How the attention of a transformer layer, counted from 0 over the whole model, communicates over
/// the context-parallel ranks. ConfigError unless parallel.cp_comm_type_of_layers, if it is set,
/// lists one for each of model.num_layers.
ContextCommunication context_communication(const TransformerConfig& model,
                                           const ParallelConfig& parallel, int64_t layer);

/// The ranks of each level that parallel.hierarchical_context_parallel_sizes lists, none if it is
/// not set. ConfigError unless they are two integers of at least 1 whose product is
/// parallel.context_parallel_size.
std::vector<int64_t> context_parallel_levels(const ParallelConfig& parallel);

}  // namespace lockstep
