#include "lockstep/models/context_parallel_cut.h"

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// Calls visit(start of the document, length of a chunk, start of its part on a rank).
template <class Visit>
void for_documents(const std::vector<int64_t>& documents, int64_t ranks, Visit visit) {
  require<UsageError>(!documents.empty(), "context parallelism: found no documents, allowed: >= 1");
  int64_t start = 0;
  for (const int64_t length : documents) {
    require<UsageError>(length > 0 && length % (2 * ranks) == 0,
                        "context parallelism: found a document of {} tokens, allowed: a multiple "
                        "of {} tokens, twice the context-parallel ranks",
                        length, 2 * ranks);
    visit(start, length / (2 * ranks), start / ranks);
    start += length;
  }
}

std::vector<AttentionBlock> whole_documents(const std::vector<int64_t>& documents, bool causal) {
  std::vector<AttentionBlock> blocks;
  int64_t start = 0;
  for (const int64_t length : documents) {
    blocks.push_back({{start, length}, {start, length}, causal});
    start += length;
  }
  return blocks;
}

}  // namespace

int64_t padded_for_context(int64_t length, int64_t ranks) {
  return ranks == 1 ? length : round_up(length, 2 * ranks);
}

std::vector<Chunk> context_pieces(const std::vector<int64_t>& documents, int64_t ranks,
                                  int64_t rank) {
  std::vector<Chunk> pieces;
  if (ranks == 1) {
    for (const AttentionBlock& document : whole_documents(documents, false))
      pieces.push_back(document.keys);
    return pieces;
  }
  for_documents(documents, ranks, [&](int64_t start, int64_t chunk, int64_t /*local*/) {
    pieces.push_back({start + rank * chunk, chunk});
    pieces.push_back({start + (2 * ranks - 1 - rank) * chunk, chunk});
  });
  return pieces;
}

std::vector<AttentionBlock> ring_blocks(const std::vector<int64_t>& documents, int64_t ranks,
                                        int64_t rank, int64_t key_rank, bool causal) {
  if (ranks == 1) return whole_documents(documents, causal);
  std::vector<AttentionBlock> blocks;
  for_documents(documents, ranks, [&](int64_t /*start*/, int64_t chunk, int64_t local) {
    const Chunk both{local, 2 * chunk}, first{local, chunk}, second{local + chunk, chunk};
    if (!causal || rank == key_rank)
      blocks.push_back({both, both, causal});
    else if (key_rank < rank)
      blocks.push_back({both, first, false});
    else
      blocks.push_back({second, both, false});
  });
  return blocks;
}

std::vector<AttentionBlock> gathered_blocks(const std::vector<int64_t>& documents, int64_t ranks,
                                            int64_t rank, bool causal) {
  if (ranks == 1) return whole_documents(documents, causal);
  std::vector<AttentionBlock> blocks;
  for_documents(documents, ranks, [&](int64_t start, int64_t chunk, int64_t local) {
    if (!causal) {
      blocks.push_back({{local, 2 * chunk}, {start, 2 * ranks * chunk}, false});
      return;
    }
    for (const int64_t index : {rank, 2 * ranks - 1 - rank}) {
      const Chunk queries{index == rank ? local : local + chunk, chunk};
      blocks.push_back({queries, {start + index * chunk, chunk}, true});
      if (index > 0) blocks.push_back({queries, {start, index * chunk}, false});
    }
  });
  return blocks;
}

}  // namespace lockstep
