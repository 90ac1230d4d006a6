#pragma once

#include <cstdint>

namespace lockstep {

/// The token ids whose rows (of the embedding) and columns (of the logits) a rank of tp holds: they
/// are `first`, first + 1, ..., `held` in number, possibly none; padding follows up to `rows`.
struct VocabPartition {
  int64_t vocab_size = 0;  ///< token ids over all ranks
  int64_t rows = 0;        ///< on this rank, padding included
  int64_t first = 0;       ///< token id of the first row
  int64_t held = 0;        ///< rows that belong to a token id

  bool operator==(const VocabPartition&) const = default;
};

/// The part of rank `rank` of `ranks`. `rows` are those of all ranks, a multiple of `ranks` and at
/// least `vocab_size`.
inline VocabPartition vocab_partition(int64_t vocab_size, int64_t rows, int64_t rank,
                                      int64_t ranks) {
  const int64_t part = rows / ranks, first = part * rank;
  const int64_t rest = vocab_size > first ? vocab_size - first : 0;
  return {vocab_size, part, first, rest < part ? rest : part};
}

}  // namespace lockstep
