#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "lockstep/parallel_state/shard_layout.h"

/// How context parallelism cuts a sequence over ranks: integer arithmetic without tensors.
///
/// A sequence is cut into 2 * ranks chunks of equal length. Rank r holds the chunks r and
/// 2 * ranks - 1 - r, so that all ranks have the same work under a causal mask ("zig-zag", as in
/// Megatron Core). A packed sequence is cut document by document: a rank holds its two chunks of
/// the first document, then those of the second, and so on. `documents` lists the lengths of the
/// documents in tokens; a sequence that is not packed is one document.
namespace lockstep {

/// `length` rounded up to what can be cut: a multiple of 2 * ranks, or of 1 for one rank.
int64_t padded_for_context(int64_t length, int64_t ranks);

/// UsageError: no documents, one of fewer than 1 token, or, over several ranks, one whose length is
/// not a multiple of 2 * ranks.
void check_context_documents(const std::vector<int64_t>& documents, int64_t ranks);

/// The ranges of the whole sequence that `rank` holds, in the order in which it holds them.
/// UsageError as in check_context_documents().
std::vector<Chunk> context_pieces(const std::vector<int64_t>& documents, int64_t ranks,
                                  int64_t rank);

/// Which tokens of its document a token sees.
struct TokenView {
  bool causal = true;  ///< itself and those before it; else all
  /// With `causal`: only the last `window` of these, itself included.
  std::optional<int64_t> window = {};
};

/// Which keys of a block its queries see. With causal and anti_causal the block is square.
enum class BlockMask {
  none,        ///< all
  causal,      ///< query i the keys 0 ... i
  anti_causal  ///< query i the keys from i on
};

/// A block of the matrix of queries times keys. Offsets count tokens of the tensors at hand.
struct AttentionBlock {
  Chunk queries;
  Chunk keys;
  BlockMask mask = BlockMask::none;
  std::optional<Chunk> sequences = {};  ///< of the micro-batch; unset: all
};

/// The blocks in which queries that `rank` holds see keys that `key_rank` holds, without empty
/// ones. UsageError: as in check_context_documents(); a window of fewer than 1 token, or one that
/// is not causal.
std::vector<AttentionBlock> ring_blocks(const std::vector<int64_t>& documents, int64_t ranks,
                                        int64_t rank, int64_t key_rank, const TokenView& view);

/// The blocks in which queries that `rank` holds see keys of the whole sequence, which are in the
/// order of the sequence. UsageError as above.
std::vector<AttentionBlock> gathered_blocks(const std::vector<int64_t>& documents, int64_t ranks,
                                            int64_t rank, const TokenView& view);

/// The same for sequences that are cut as a whole, each into 2 * ranks chunks, and whose documents
/// have any lengths: `documents` has those of each sequence of the micro-batch. Causal. UsageError
/// also for sequences of different lengths.
std::vector<AttentionBlock> bounded_ring_blocks(const std::vector<std::vector<int64_t>>& documents,
                                                int64_t ranks, int64_t rank, int64_t key_rank,
                                                std::optional<int64_t> window);
std::vector<AttentionBlock> bounded_gathered_blocks(
    const std::vector<std::vector<int64_t>>& documents, int64_t ranks, int64_t rank,
    std::optional<int64_t> window);

}  // namespace lockstep
