#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Which rank sends which blocks of files to which: integer arithmetic, without libtorch.
namespace lockstep {

/// Blocks first ... last - 1 of a file.
struct BlockRun {
  int64_t file = 0;
  int64_t first = 0;
  int64_t last = 0;
  auto operator<=>(const BlockRun&) const = default;
};

/// To a text with one line each, and back. FileError if the text is not valid.
std::string format_block_runs(const std::vector<BlockRun>& runs);
std::vector<BlockRun> parse_block_runs(const std::string& text);

struct BlockTransfer {
  int64_t from = 0;
  int64_t to = 0;
  int64_t file = 0;
  int64_t block = 0;
  auto operator<=>(const BlockTransfer&) const = default;
};

/// Every block that a rank needs (`needs[rank]`) comes from one of the ranks that have its file
/// (`holders[file]`): of those that may still give one in this turn, the one that has given the
/// fewest so far; among equals, the first in the list. The same on all ranks. The result is a list
/// of turns: in no turn does a rank give or take more than `most` blocks. A rank takes blocks in
/// the order of its list, and all ranks take at the same time as far as they have different givers.
/// UsageError: a block of a file that no rank has, or that the rank itself has.
std::vector<std::vector<BlockTransfer>> plan_transfers(
    const std::vector<std::vector<BlockRun>>& needs,
    const std::vector<std::vector<int64_t>>& holders, int64_t most);

}  // namespace lockstep
