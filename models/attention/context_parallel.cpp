#include "lockstep/models/context_parallel.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/models/context_parallel_cut.h"
#include "lockstep/models/context_parallel_ring.h"
#include "lockstep/models/input_check.h"
#include "lockstep/parallel_state/parallel_functions.h"

namespace lockstep {
namespace {

using Lengths = std::vector<int64_t>;

Lengths documents_of(const Lengths& documents, int64_t length) {
  if (documents.empty()) return {length};
  const int64_t sum = std::accumulate(documents.begin(), documents.end(), int64_t{0});
  require<UsageError>(sum == length,
                      "context parallelism: found documents of {} tokens in all, allowed: the "
                      "length of the sequence ({})",
                      sum, length);
  return documents;
}

Lengths divided(Lengths lengths, int64_t divisor) {
  for (int64_t& length : lengths) length /= divisor;
  return lengths;
}

at::Tensor take(const at::Tensor& x, int64_t dim, const std::vector<Chunk>& pieces) {
  std::vector<at::Tensor> parts;
  for (const Chunk& piece : pieces) parts.push_back(x.narrow(dim, piece.start, piece.size));
  return at::cat(parts, dim);
}

/// The place of each piece of the sequence, in its order, in the concatenated parts of all ranks.
std::vector<Chunk> places_in_parts(const Lengths& documents, int64_t ranks) {
  std::vector<std::pair<int64_t, Chunk>> places;  // by place in the sequence
  int64_t start = 0;
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (const Chunk& piece : context_pieces(documents, ranks, rank)) {
      places.push_back({piece.start, {start, piece.size}});
      start += piece.size;
    }
  std::sort(places.begin(), places.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Chunk> result;
  for (const auto& place : places) result.push_back(place.second);
  return result;
}

at::Tensor to_rank_order(const at::Tensor& x, int64_t ranks, const Lengths& documents) {
  if (ranks == 1) return x;
  std::vector<Chunk> pieces;
  for (int64_t rank = 0; rank < ranks; ++rank)
    for (const Chunk& piece : context_pieces(documents, ranks, rank)) pieces.push_back(piece);
  return take(x, 0, pieces);
}

struct Heads {
  at::Tensor query, key, value;
};

/// This rank's heads of the sequence of all ranks of `group`, by one all-to-all.
Heads exchange_heads(const Heads& x, const ProcessGroup& group, const Lengths& documents) {
  const int64_t ranks = group.size();
  if (ranks == 1) return x;
  const int64_t heads = x.query.size(2) / ranks, groups = x.key.size(2) / ranks;
  const at::Tensor packed =
      at::cat({x.query.unflatten(2, {ranks, heads}), x.key.unflatten(2, {ranks, groups}),
               x.value.unflatten(2, {ranks, groups})},
              3)
          .flatten(2, 3);
  const at::Tensor all = to_sequence_order(
      all_to_all_dims(packed, group, 2, 0, "queries, keys and values"), ranks, documents);
  const auto parts = all.split_with_sizes({heads, groups, groups}, 2);
  return {parts[0], parts[1], parts[2]};
}

/// The reverse: all heads of this rank's part of the sequence.
at::Tensor return_heads(const at::Tensor& output, const ProcessGroup& group,
                        const Lengths& documents) {
  if (group.size() == 1) return output;
  return all_to_all_dims(to_rank_order(output, group.size(), documents), group, 0, 2,
                         "attention output");
}

/// How sequences are cut, and which tokens a token sees.
struct WholeSequence {
  Lengths documents;
  TokenView view;
  std::shared_ptr<const SequenceDocuments> bounds;

  std::vector<AttentionBlock> gathered(const ProcessGroup& group) const {
    if (bounds) return bounded_gathered_blocks(*bounds, group.size(), group.rank(), view.window);
    return gathered_blocks(documents, group.size(), group.rank(), view);
  }

  std::vector<AttentionBlock> round_ring(const ProcessGroup& ring, int64_t step) const {
    const int64_t ranks = ring.size(), from = (ring.rank() + ranks - step) % ranks;
    if (bounds) return bounded_ring_blocks(*bounds, ranks, ring.rank(), from, view.window);
    return ring_blocks(documents, ranks, ring.rank(), from, view);
  }
};

at::Tensor gathered_attention(const Heads& x, const ContextParallel& context,
                              const WholeSequence& whole) {
  const ProcessGroup& group = context.group;
  const int64_t ranks = group.size(), groups = x.key.size(2);
  const at::Tensor both = gather_from_group(at::cat({x.key, x.value}, 2), group, 0,
                                            GradientState::partial_sum, "keys and values");
  const auto parts = to_sequence_order(both, ranks, whole.documents).split(groups, 2);
  return ring_attention(x.query, parts[0], parts[1], context.ring, {whole.gathered(group)});
}

at::Tensor exchanged_attention(const Heads& x, const ContextParallel& context,
                               const WholeSequence& whole) {
  const int64_t ranks = context.ring.size();
  const Lengths inner = divided(whole.documents, ranks);
  const Heads y = exchange_heads(x, context.heads, inner);
  std::vector<std::vector<AttentionBlock>> blocks;
  for (int64_t step = 0; step < ranks; ++step)
    blocks.push_back(whole.round_ring(context.ring, step));
  return return_heads(ring_attention(y.query, y.key, y.value, context.ring, blocks), context.heads,
                      inner);
}

void check_shapes(const Heads& x, const ContextParallel& context) {
  const at::Tensor &q = x.query, &k = x.key, &v = x.value;
  require<UsageError>(q.dim() == 4 && k.dim() == 4 && k.sizes() == v.sizes() &&
                          q.size(0) == k.size(0) && q.size(1) == k.size(1) &&
                          q.size(3) == k.size(3) && k.size(2) > 0 && q.size(2) % k.size(2) == 0,
                      "context_attention: found query {}, key {}, value {}, allowed: [sequence, "
                      "batch, heads, channels], keys and values alike with a divisor of the heads",
                      fmt::join(q.sizes(), " x "), fmt::join(k.sizes(), " x "),
                      fmt::join(v.sizes(), " x "));
  require<UsageError>(k.size(2) % context.heads.size() == 0,
                      "context_attention: found {} key heads, allowed: a multiple of the {} ranks "
                      "of {} that exchange heads",
                      k.size(2), context.heads.size(), context.heads.to_string());
}

void check_bounds(const ContextAttentionOptions& options, int64_t batch, int64_t length) {
  if (!options.bounds) return;
  require<UsageError>(options.causal && options.documents.empty(),
                      "context_attention: found bounds {}, allowed: with causal attention over "
                      "sequences that are cut as a whole",
                      options.causal ? "beside documents" : "without causal attention");
  check_sequence_documents(*options.bounds, batch, length, "context_attention: bounds");
}

}  // namespace

ContextParallel ContextParallel::of(const ParallelState& state,
                                    ContextCommunication communication) {
  const ProcessGroup group = state.group(GroupKind::cp);
  const ProcessGroup alone = state.group_of_ranks("cp-one", {state.rank()});
  const auto level = [&](size_t index) {
    const RankGroups groups = state.grids().context_level(index);
    return state.group_of_ranks("cp-level-" + std::to_string(index),
                                groups.group(*groups.index_of(state.rank())));
  };
  switch (communication) {
    case ContextCommunication::p2p:
      return {communication, group, alone, group};
    case ContextCommunication::all_gather:
      return {communication, group, alone, alone};
    case ContextCommunication::a2a:
      return {communication, group, group, alone};
    case ContextCommunication::a2a_p2p:
      break;
  }
  const auto& levels = state.grids().sizes().hierarchical_context;
  require<ConfigError>(levels.size() == 2,
                       "parallel.hierarchical_context_parallel_sizes: found {} levels, allowed "
                       "with parallel.cp_comm_type = a2a+p2p: 2",
                       levels.size());
  return {communication, group, level(0), level(1)};
}

at::Tensor cut_for_context(const at::Tensor& x, int64_t dim, const ProcessGroup& group,
                           const std::vector<int64_t>& documents) {
  if (group.size() == 1) return x;
  return take(x, dim,
              context_pieces(documents_of(documents, x.size(dim)), group.size(), group.rank()));
}

at::Tensor context_positions(int64_t length, const ProcessGroup& group) {
  return cut_for_context(at::arange(length * group.size(), at::kLong), 0, group);
}

at::Tensor to_sequence_order(const at::Tensor& x, int64_t ranks,
                             const std::vector<int64_t>& documents) {
  if (ranks == 1) return x;
  return take(x, 0, places_in_parts(documents_of(documents, x.size(0)), ranks));
}

at::Tensor context_attention(const at::Tensor& query, const at::Tensor& key,
                             const at::Tensor& value, const ContextParallel& context,
                             const ContextAttentionOptions& options) {
  const Heads x{query, key, value};
  check_shapes(x, context);
  const int64_t length = query.size(0) * context.group.size();
  check_bounds(options, query.size(1), length);
  const WholeSequence whole = {
      documents_of(options.documents, length), {options.causal, options.window}, options.bounds};
  check_context_documents(whole.documents, context.group.size());
  const bool gathered = context.communication == ContextCommunication::all_gather;
  const at::Tensor output =
      gathered ? gathered_attention(x, context, whole) : exchanged_attention(x, context, whole);
  return output.flatten(2);
}

}  // namespace lockstep
