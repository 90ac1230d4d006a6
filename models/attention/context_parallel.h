#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/models/token_positions.h"
#include "lockstep/parallel_state/parallel_state.h"

/// Context parallelism: each rank of the group `cp` holds a part of every sequence, cut as
/// context_parallel_cut.h says, through all layers; only attention looks across ranks. Parameters
/// are replicated and their gradients partial sums over cp, which is the default of
/// ParamDescription.
namespace lockstep {

/// Over which ranks sequences are cut, and how attention sees the whole.
struct ContextParallel {
  ContextCommunication communication = ContextCommunication::p2p;
  ProcessGroup group;  ///< cp
  ProcessGroup heads;  ///< those that exchange heads for sequence
  ProcessGroup ring;   ///< those around which keys and values pass

  /// The groups of this rank. p2p: the ring is all of cp. a2a: heads are exchanged in all of cp.
  /// a2a+p2p: the first level of ParallelSizes::hierarchical_context exchanges heads, the second is
  /// the ring. Connects the groups, so all ranks of cp must call it. ConfigError: a2a+p2p without
  /// two levels.
  static ContextParallel of(const ParallelState& state, ContextCommunication communication);
};

/// This rank's part of `x` along `dim`, whose size is the sum of `documents` (lengths of the packed
/// documents in tokens; empty: one sequence of that size). Differentiable. In a group of one rank
/// it is `x` itself. UsageError as in context_pieces().
at::Tensor cut_for_context(const at::Tensor& x, int64_t dim, const ProcessGroup& group,
                           const std::vector<int64_t>& documents = {});

/// The reverse, for an `x` that holds the parts of all `ranks`, in their order, along dimension 0:
/// puts them in the order of the sequence.
at::Tensor to_sequence_order(const at::Tensor& x, int64_t ranks,
                             const std::vector<int64_t>& documents = {});

/// The positions of this rank's `length` tokens in their sequence, of length * group.size() tokens:
/// [length] of int64, on the CPU.
at::Tensor context_positions(int64_t length, const ProcessGroup& group);

struct ContextAttentionOptions {
  bool causal = true;  ///< a token sees itself and those before it, in its document
  /// With `causal`: only the last `window` of these, itself included.
  std::optional<int64_t> window = {};
  std::vector<int64_t> documents = {};  ///< of the whole sequence; see cut_for_context()
  /// Documents of any lengths in sequences that are cut as a whole: with `causal`, and with no
  /// `documents`. Null: none.
  std::shared_ptr<const SequenceDocuments> bounds = {};
};

/// softmax(q k^T / sqrt(channels)) v over the whole sequence. `query` [local sequence, batch,
/// heads, channels] is this rank's part; `key` and `value` likewise, with a number of heads that
/// divides that of `query`: each of their heads serves heads / key-heads neighbouring query heads.
/// -> [local sequence, batch, heads * channels]. Communication of a rank, s being its part of the
/// sequence and n the ranks:
///
/// - p2p: n - 1 messages of its keys and values to the next rank, each while a block is computed;
///   see ring_attention(). Memory grows with s.
/// - all_gather: one all-gather of keys and values, one reduce-scatter of their gradients. Memory
///   for n s keys.
/// - a2a: one all-to-all of queries, keys and values, one of the result, and the same in backward.
///   Needs key-heads divisible by n. Memory for n s tokens of heads / n.
/// - a2a+p2p: a2a inside `heads`, p2p over `ring`.
///
/// Windows and documents change none of these: blocks of keys that no query of a rank sees are not
/// computed.
///
/// Errors: UsageError for shapes and documents (with none: a sequence) that do not fit, before
/// anything is sent, for windows that do not fit, and for backward with create_graph;
/// CommunicationError.
at::Tensor context_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const ContextParallel& context,
                             const ContextAttentionOptions& options = {});

}  // namespace lockstep
