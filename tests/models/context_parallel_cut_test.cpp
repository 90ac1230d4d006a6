#include "lockstep/models/context_parallel_cut.h"

#include <gtest/gtest.h>

#include <map>
#include <numeric>
#include <optional>
#include <set>

#include "lockstep/core/error.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using testing::throws_with;

std::vector<int64_t> tokens(const std::vector<int64_t>& documents, int64_t ranks, int64_t rank) {
  std::vector<int64_t> result;
  for (const Chunk& piece : context_pieces(documents, ranks, rank))
    for (int64_t i = 0; i < piece.size; ++i) result.push_back(piece.start + i);
  return result;
}

using Tokens = std::vector<int64_t>;

// The golden cases of Megatron Core's get_batch_on_this_cp_rank.
TEST(ContextCut, SixteenTokensOverTwoRanks) {
  EXPECT_EQ(tokens({16}, 2, 0), (Tokens{0, 1, 2, 3, 12, 13, 14, 15}));
  EXPECT_EQ(tokens({16}, 2, 1), (Tokens{4, 5, 6, 7, 8, 9, 10, 11}));
}

TEST(ContextCut, SixteenTokensOverFourRanks) {
  EXPECT_EQ(tokens({16}, 4, 0), (Tokens{0, 1, 14, 15}));
  EXPECT_EQ(tokens({16}, 4, 1), (Tokens{2, 3, 12, 13}));
  EXPECT_EQ(tokens({16}, 4, 2), (Tokens{4, 5, 10, 11}));
  EXPECT_EQ(tokens({16}, 4, 3), (Tokens{6, 7, 8, 9}));
}

TEST(ContextCut, PackedDocumentsAreCutOneByOne) {
  EXPECT_EQ(tokens({4, 8}, 2, 0), (Tokens{0, 3, 4, 5, 10, 11}));
  EXPECT_EQ(tokens({4, 8}, 2, 1), (Tokens{1, 2, 6, 7, 8, 9}));
  EXPECT_EQ(tokens({3, 2}, 1, 0), (Tokens{0, 1, 2, 3, 4}));
}

TEST(ContextCut, LengthsThatCannotBeCut) {
  EXPECT_TRUE(throws_with<UsageError>([] { context_pieces({10}, 2, 0); },
                                      "found a document of 10 tokens, allowed: a multiple of 4"));
  EXPECT_TRUE(throws_with<UsageError>([] { context_pieces({8, 0}, 2, 0); }, "of 0 tokens"));
  EXPECT_TRUE(throws_with<UsageError>([] { context_pieces({}, 2, 0); }, "no documents"));
  EXPECT_TRUE(throws_with<UsageError>(
      [] {
        context_pieces({8, 0}, 1, 0);
      },
      "found a document of 0 tokens, allowed: >= 1"));
  EXPECT_TRUE(throws_with<UsageError>([] { context_pieces({}, 1, 0); }, "no documents"));
  for (const std::optional<int64_t> window : {std::optional<int64_t>{}, {4}}) {
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          ring_blocks({8, 0}, 1, 0, 0, {.window = window});
        },
        "of 0 tokens"));
    EXPECT_TRUE(throws_with<UsageError>(
        [&] {
          gathered_blocks({16, -8}, 1, 0, {.window = window});
        },
        "of -8 tokens"));
  }
  EXPECT_EQ(padded_for_context(9, 2), 12);
  EXPECT_EQ(padded_for_context(12, 2), 12);
  EXPECT_EQ(padded_for_context(9, 1), 9);
}

/// How often each pair (query, key) is computed, as tokens of the whole sequence.
using Pairs = std::map<std::pair<int64_t, int64_t>, int64_t>;

void count_pairs(const std::vector<AttentionBlock>& blocks, const Tokens& queries,
                 const Tokens& keys, Pairs& pairs) {
  for (const AttentionBlock& block : blocks)
    for (int64_t q = 0; q < block.queries.size; ++q) {
      const int64_t first = block.mask == BlockMask::anti_causal ? q : 0;
      const int64_t end = block.mask == BlockMask::causal ? q + 1 : block.keys.size;
      EXPECT_TRUE(block.mask == BlockMask::none || block.queries.size == block.keys.size);
      for (int64_t k = first; k < end; ++k)
        ++pairs[{queries.at(static_cast<size_t>(block.queries.start + q)),
                 keys.at(static_cast<size_t>(block.keys.start + k))}];
    }
}

Pairs expected_pairs(const Tokens& documents, const TokenView& view) {
  Pairs pairs;
  int64_t start = 0;
  for (const int64_t length : documents) {
    for (int64_t q = 0; q < length; ++q)
      for (int64_t k = 0; k < (view.causal ? q + 1 : length); ++k)
        if (!view.window || q - k < *view.window) pairs[{start + q, start + k}] = 1;
    start += length;
  }
  return pairs;
}

/// For a ring and for gathered keys.
void expect_each_pair_once(const Tokens& documents, int64_t ranks, const TokenView& view) {
  int64_t total = 0;
  for (const int64_t length : documents) total += length;
  const Tokens all = tokens({total}, 1, 0);
  Pairs ring, gathered;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Tokens own = tokens(documents, ranks, rank);
    count_pairs(gathered_blocks(documents, ranks, rank, view), own, all, gathered);
    for (int64_t other = 0; other < ranks; ++other)
      count_pairs(ring_blocks(documents, ranks, rank, other, view), own,
                  tokens(documents, ranks, other), ring);
  }
  EXPECT_EQ(ring, expected_pairs(documents, view)) << ranks;
  EXPECT_EQ(gathered, expected_pairs(documents, view)) << ranks;
}

TEST(ContextCut, BlocksCoverWhatTheMaskLetsThroughOnce) {
  for (const int64_t ranks : {1, 2, 3, 4, 5})
    for (const Tokens& documents : {Tokens{2 * ranks}, Tokens{4 * ranks, 2 * ranks, 6 * ranks}})
      for (const bool causal : {true, false})
        expect_each_pair_once(documents, ranks, {.causal = causal});
}

TEST(ContextCut, BlocksCoverAWindowOnce) {
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const Tokens& documents : {Tokens{10 * ranks}, Tokens{4 * ranks, 2 * ranks, 12 * ranks}})
      for (const int64_t window : {1, 2, 3, 4, 5, 7, 8, 11, 13, 17, 30, 48, 100}) {
        SCOPED_TRACE(window);
        expect_each_pair_once(documents, ranks, {.window = window});
      }
}

/// For sequences that are cut as a whole and whose documents have any lengths.
void expect_bounded_pairs_once(const std::vector<Tokens>& sequences, int64_t ranks,
                               std::optional<int64_t> window) {
  const int64_t total = std::accumulate(sequences[0].begin(), sequences[0].end(), int64_t{0});
  const Tokens all = tokens({total}, 1, 0);
  std::vector<Pairs> ring(sequences.size()), gathered(sequences.size());
  const auto count = [&](const std::vector<AttentionBlock>& blocks, const Tokens& queries,
                         const Tokens& keys, std::vector<Pairs>& pairs) {
    for (const AttentionBlock& block : blocks)
      for (size_t i = 0; i < sequences.size(); ++i)
        if (!block.sequences || block.sequences->start == static_cast<int64_t>(i))
          count_pairs({block}, queries, keys, pairs[i]);
  };
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const Tokens own = tokens({total}, ranks, rank);
    count(bounded_gathered_blocks(sequences, ranks, rank, window), own, all, gathered);
    for (int64_t other = 0; other < ranks; ++other)
      count(bounded_ring_blocks(sequences, ranks, rank, other, window), own,
            tokens({total}, ranks, other), ring);
  }
  for (size_t i = 0; i < sequences.size(); ++i) {
    EXPECT_EQ(ring[i], expected_pairs(sequences[i], {.window = window})) << ranks << ", " << i;
    EXPECT_EQ(gathered[i], expected_pairs(sequences[i], {.window = window})) << ranks << ", " << i;
  }
}

TEST(ContextCut, BlocksCoverDocumentsOfAnyLengthsOnce) {
  const std::vector<std::vector<Tokens>> cases = {
      {{24}},
      {{5, 19}},
      {{1, 1, 7, 15}, {24}, {23, 1}, {6, 6, 6, 6}, Tokens(24, 1)},
      {{12, 12}, {12, 12}},
      {{3, 8, 13}, {2, 22}}};
  for (const int64_t ranks : {1, 2, 3, 4})
    for (const auto& sequences : cases)
      for (const std::optional<int64_t> window : {std::optional<int64_t>{}, {1}, {2}, {5}, {100}})
        expect_bounded_pairs_once(sequences, ranks, window);
}

TEST(ContextCut, OneBlockForEachDocumentAndAllSequencesThatAreAlike) {
  const auto alike = bounded_gathered_blocks({{3, 5}, {3, 5}}, 1, 0, {});
  ASSERT_EQ(alike.size(), 2U);
  EXPECT_FALSE(alike[0].sequences);
  EXPECT_EQ(alike[1].queries.start, 3);
  EXPECT_EQ(alike[1].mask, BlockMask::causal);
  const auto apart = bounded_gathered_blocks({{3, 5}, {8}}, 1, 0, {});
  ASSERT_EQ(apart.size(), 3U);
  EXPECT_EQ(apart[2].sequences->start, 1);
  EXPECT_EQ(apart[2].queries.size, 8);
}

TEST(ContextCut, DocumentsThatCannotBe) {
  const auto blocks = [](const std::vector<Tokens>& sequences) {
    return [=] { bounded_gathered_blocks(sequences, 2, 0, {}); };
  };
  EXPECT_TRUE(throws_with<UsageError>(blocks({{3, 5}, {4, 3}}),
                                      "found documents of 7 tokens in all, one of them of 3; "
                                      "allowed: 8 tokens, as in the first sequence"));
  EXPECT_TRUE(throws_with<UsageError>(blocks({{8, 0}}), "one of them of 0"));
  EXPECT_TRUE(throws_with<UsageError>(blocks({{3, 3}}), "a multiple of 4 tokens"));
  EXPECT_TRUE(throws_with<UsageError>(blocks({}), "found no sequences"));
}

TEST(ContextCut, AWindowOfALongSequenceIsFewLargeBlocks) {
  const auto blocks = gathered_blocks({8192}, 1, 0, {.window = 1025});
  EXPECT_EQ(blocks.size(), 8U + 7U);  // causal triangles of 1,024 tokens, and those before them
  for (const AttentionBlock& block : blocks) EXPECT_EQ(block.queries.size, 1024);
}

TEST(ContextCut, WindowsThatCannotBe) {
  EXPECT_TRUE(throws_with<UsageError>([] { gathered_blocks({8}, 1, 0, {.window = 0}); },
                                      "found a window of 0 tokens, allowed: >= 1 token"));
  EXPECT_TRUE(
      throws_with<UsageError>([] { ring_blocks({8}, 2, 0, 1, {.causal = false, .window = 2}); },
                              "a window of 2 tokens without causal attention, allowed"));
}

TEST(ContextCut, CausalWorkIsTheSameOnAllRanksInEveryStep) {
  const int64_t ranks = 4;
  const Tokens documents = {64, 32};
  for (int64_t step = 0; step < ranks; ++step) {
    std::set<int64_t> work;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      int64_t area = 0;
      for (const AttentionBlock& block :
           ring_blocks(documents, ranks, rank, (rank + ranks - step) % ranks, {}))
        area += block.queries.size * block.keys.size;
      work.insert(area);
    }
    EXPECT_EQ(work.size(), 1) << "step " << step;
  }
}

}  // namespace
}  // namespace lockstep
