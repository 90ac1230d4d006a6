#include "lockstep/models/context_parallel_cut.h"

#include <algorithm>
#include <numeric>

#include "lockstep/core/check.h"
#include "lockstep/core/integers.h"

namespace lockstep {
namespace {

/// Calls visit(start of the document, length of a chunk, start of its part on a rank).
template <class Visit>
void for_documents(const std::vector<int64_t>& documents, int64_t ranks, Visit visit) {
  check_context_documents(documents, ranks);
  int64_t start = 0;
  for (const int64_t length : documents) {
    visit(start, length / (2 * ranks), start / ranks);
    start += length;
  }
}

BlockMask mask_of(bool causal) { return causal ? BlockMask::causal : BlockMask::none; }

std::vector<AttentionBlock> whole_documents(const std::vector<int64_t>& documents, bool causal) {
  check_context_documents(documents, /*ranks=*/1);
  std::vector<AttentionBlock> blocks;
  int64_t start = 0;
  for (const int64_t length : documents) {
    blocks.push_back({{start, length}, {start, length}, mask_of(causal)});
    start += length;
  }
  return blocks;
}

/// Whether the window hides anything.
bool is_windowed(const std::vector<int64_t>& documents, const TokenView& view) {
  if (!view.window) return false;
  require<UsageError>(*view.window >= 1 && view.causal,
                      "attention: found a window of {} tokens{}, allowed: >= 1 token, with causal "
                      "attention",
                      *view.window, view.causal ? "" : " without causal attention");
  return std::any_of(documents.begin(), documents.end(),
                     [&](int64_t length) { return length > *view.window; });
}

/// Neighbouring queries of a sequence and the keys that they see, as places in the sequence. These
/// keys form a band: a triangle at its lower end, a rectangle and the causal triangle.
struct Band {
  Chunk queries;  ///< fewer than `window`, or one
  int64_t local;  ///< place of the first among the tensors' queries
  int64_t document;
  int64_t window;

  /// Adds the part of the band in `piece`, whose keys begin at `keys` in the tensors.
  void add_to(std::vector<AttentionBlock>& blocks, const Chunk& piece, int64_t keys) const {
    const int64_t end = piece.start + piece.size, lowest = queries.start - window + 1;
    const int64_t first = std::max(piece.start, document);
    const auto add = [&](int64_t row, int64_t rows, int64_t from, int64_t to, BlockMask mask) {
      if (rows > 0 && from < to)
        blocks.push_back({{local + row, rows}, {keys + from - piece.start, to - from}, mask});
    };
    if (window > 1) {
      const int64_t from = std::max(lowest, first), to = std::min(lowest + queries.size, end);
      add(0, from - lowest, from, to, BlockMask::none);
      add(from - lowest, to - from, from, to, BlockMask::anti_causal);
      add(0, queries.size, std::max(lowest + queries.size, first), std::min(queries.start, end),
          BlockMask::none);
    }
    if (first <= queries.start && queries.start < end)
      add(0, queries.size, queries.start, queries.start + queries.size, BlockMask::causal);
  }
};

/// The blocks of the queries in `own` and the keys in `pieces`, both in the order of the tensors.
/// Pieces may hold several documents.
std::vector<AttentionBlock> window_blocks(const std::vector<int64_t>& documents,
                                          const std::vector<Chunk>& own,
                                          const std::vector<Chunk>& pieces, int64_t window) {
  std::vector<AttentionBlock> blocks;
  const int64_t longest = std::max<int64_t>(1, window - 1);
  int64_t local = 0, document = 0;
  size_t next = 0;
  for (const Chunk& part : own) {
    for (int64_t done = 0, size = 0; done < part.size; done += size) {
      const int64_t start = part.start + done;
      while (start >= document + documents[next]) document += documents[next++];
      size = std::min({longest, part.size - done, document + documents[next] - start});
      const Chunk queries = {start, size};
      const Band band{queries, local + done, document, window};
      int64_t keys = 0;
      for (const Chunk& piece : pieces) {
        band.add_to(blocks, piece, keys);
        keys += piece.size;
      }
    }
    local += part.size;
  }
  return blocks;
}

int64_t sum_of(const std::vector<int64_t>& lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

using SequenceLengths = std::vector<std::vector<int64_t>>;

/// The length of each sequence, which is the same for all.
int64_t sequence_length(const SequenceLengths& documents) {
  require<UsageError>(!documents.empty(), "attention: found no sequences, allowed: >= 1");
  const int64_t length = sum_of(documents[0]);
  for (const std::vector<int64_t>& lengths : documents) {
    const bool good = std::all_of(lengths.begin(), lengths.end(), [](int64_t n) { return n > 0; });
    require<UsageError>(good && !lengths.empty() && sum_of(lengths) == length,
                        "attention: found documents of {} tokens in all, one of them of {}; "
                        "allowed: {} tokens, as in the first sequence, in documents of >= 1",
                        sum_of(lengths),
                        lengths.empty() ? 0 : *std::min_element(lengths.begin(), lengths.end()),
                        length);
  }
  return length;
}

/// Separate blocks for each sequence, or blocks of all sequences if their documents are alike.
std::vector<AttentionBlock> bounded_blocks(const SequenceLengths& documents,
                                           const std::vector<Chunk>& own,
                                           const std::vector<Chunk>& pieces,
                                           std::optional<int64_t> window) {
  const auto alike = [&](const std::vector<int64_t>& other) { return other == documents[0]; };
  const bool all = std::all_of(documents.begin(), documents.end(), alike);
  std::vector<AttentionBlock> blocks;
  for (size_t i = 0; i < (all ? 1 : documents.size()); ++i) {
    const bool windowed = is_windowed(documents[i], {.window = window});
    // A window that hides nothing allows any number of queries in one block.
    const int64_t seen = windowed ? *window : sum_of(documents[i]) + 1;
    for (AttentionBlock& block : window_blocks(documents[i], own, pieces, seen)) {
      if (!all) block.sequences = Chunk{static_cast<int64_t>(i), 1};
      blocks.push_back(block);
    }
  }
  return blocks;
}

}  // namespace

int64_t padded_for_context(int64_t length, int64_t ranks) {
  return ranks == 1 ? length : round_up(length, 2 * ranks);
}

void check_context_documents(const std::vector<int64_t>& documents, int64_t ranks) {
  require<UsageError>(!documents.empty(), "context parallelism: found no documents, allowed: >= 1");
  for (const int64_t length : documents) {
    require<UsageError>(ranks > 1 || length > 0,
                        "context parallelism: found a document of {} tokens, allowed: >= 1",
                        length);
    require<UsageError>(ranks == 1 || (length > 0 && length % (2 * ranks) == 0),
                        "context parallelism: found a document of {} tokens, allowed: a multiple "
                        "of {} tokens, twice the context-parallel ranks",
                        length, 2 * ranks);
  }
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
                                        int64_t rank, int64_t key_rank, const TokenView& view) {
  if (is_windowed(documents, view))
    return window_blocks(documents, context_pieces(documents, ranks, rank),
                         context_pieces(documents, ranks, key_rank), *view.window);
  if (ranks == 1) return whole_documents(documents, view.causal);
  std::vector<AttentionBlock> blocks;
  for_documents(documents, ranks, [&](int64_t /*start*/, int64_t chunk, int64_t local) {
    const Chunk both{local, 2 * chunk}, first{local, chunk}, second{local + chunk, chunk};
    if (!view.causal || rank == key_rank)
      blocks.push_back({both, both, mask_of(view.causal)});
    else if (key_rank < rank)
      blocks.push_back({both, first});
    else
      blocks.push_back({second, both});
  });
  return blocks;
}

std::vector<AttentionBlock> gathered_blocks(const std::vector<int64_t>& documents, int64_t ranks,
                                            int64_t rank, const TokenView& view) {
  if (is_windowed(documents, view)) {
    return window_blocks(documents, context_pieces(documents, ranks, rank),
                         {{0, sum_of(documents)}}, *view.window);
  }
  if (ranks == 1) return whole_documents(documents, view.causal);
  std::vector<AttentionBlock> blocks;
  for_documents(documents, ranks, [&](int64_t start, int64_t chunk, int64_t local) {
    if (!view.causal) {
      blocks.push_back({{local, 2 * chunk}, {start, 2 * ranks * chunk}});
      return;
    }
    for (const int64_t index : {rank, 2 * ranks - 1 - rank}) {
      const Chunk queries{index == rank ? local : local + chunk, chunk};
      blocks.push_back({queries, {start + index * chunk, chunk}, BlockMask::causal});
      if (index > 0) blocks.push_back({queries, {start, index * chunk}});
    }
  });
  return blocks;
}

std::vector<AttentionBlock> bounded_ring_blocks(const SequenceLengths& documents, int64_t ranks,
                                                int64_t rank, int64_t key_rank,
                                                std::optional<int64_t> window) {
  const std::vector<int64_t> whole = {sequence_length(documents)};
  return bounded_blocks(documents, context_pieces(whole, ranks, rank),
                        context_pieces(whole, ranks, key_rank), window);
}

std::vector<AttentionBlock> bounded_gathered_blocks(const SequenceLengths& documents, int64_t ranks,
                                                    int64_t rank, std::optional<int64_t> window) {
  const std::vector<int64_t> whole = {sequence_length(documents)};
  return bounded_blocks(documents, context_pieces(whole, ranks, rank), {{0, whole[0]}}, window);
}

}  // namespace lockstep
