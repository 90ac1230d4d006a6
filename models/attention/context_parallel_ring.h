#pragma once

// Internal.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/models/context_parallel_cut.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Attention over a ring: in step s this rank computes blocks[s] with the keys and values of the
/// rank s places before it, while it passes them on. Backward goes around likewise, and the
/// gradients of keys and values follow. A rank sends group.size() - 1 messages [2, keys, batch,
/// key-heads, channels] in forward, as many in backward, and as many of their gradients (in fp32;
/// fp64 for fp64). Between steps it holds two of them. In a group of one rank this is attention
/// over blocks[0].
///
/// `query` [sequence, batch, heads, channels]; `key` and `value` [keys, batch, key-heads, channels]
/// -> like `query`. All ranks of the group must call it in the same order with the same shapes.
at::Tensor ring_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const ProcessGroup& group,
                          const std::vector<std::vector<AttentionBlock>>& blocks);

}  // namespace lockstep
