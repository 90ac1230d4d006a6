#include "lockstep/checkpoint/block_transfers.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using Blocks = std::vector<std::pair<int64_t, int64_t>>;  ///< file and block

/// The blocks that rank `to` needs, in reverse order.
Blocks blocks_of(const std::vector<BlockRun>& runs, size_t to,
                 const std::vector<std::vector<int64_t>>& holders) {
  Blocks blocks;
  for (const BlockRun& run : runs) {
    const std::vector<int64_t>& have = holders.at(static_cast<size_t>(run.file));
    require<UsageError>(
        !have.empty() && std::find(have.begin(), have.end(), to) == have.end(),
        "transfers: rank {} needs blocks {} to {} of file {}, which the ranks [{}] have; "
        "allowed: one that others have",
        to, run.first, run.last, run.file, fmt::join(have, ", "));
    for (int64_t block = run.first; block < run.last; ++block) blocks.emplace_back(run.file, block);
  }
  std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

/// Among the ranks that have the file and may give more in this turn, the one that has given the
/// fewest blocks; -1 if none may.
int64_t giver(const std::vector<int64_t>& have, const std::vector<int64_t>& given,
              const std::vector<int64_t>& gives, int64_t most) {
  int64_t found = -1;
  for (const int64_t rank : have)
    if (gives[static_cast<size_t>(rank)] < most &&
        (found < 0 || given[static_cast<size_t>(rank)] < given[static_cast<size_t>(found)]))
      found = rank;
  return found;
}

}  // namespace

std::string format_block_runs(const std::vector<BlockRun>& runs) {
  std::string text;
  for (const BlockRun& run : runs) text += fmt::format("{} {} {}\n", run.file, run.first, run.last);
  return text;
}

std::vector<BlockRun> parse_block_runs(const std::string& text) {
  std::vector<BlockRun> runs;
  std::istringstream lines(text);
  for (BlockRun run; lines >> run.file >> run.first >> run.last;) runs.push_back(run);
  require<FileError>(lines.eof(), "a rank's list of blocks is damaged after {} entries",
                     runs.size());
  return runs;
}

std::vector<std::vector<BlockTransfer>> plan_transfers(
    const std::vector<std::vector<BlockRun>>& needs,
    const std::vector<std::vector<int64_t>>& holders, int64_t most) {
  const size_t ranks = needs.size();
  std::vector<Blocks> left(ranks);  // the last one is needed first
  for (size_t to = 0; to < ranks; ++to) left[to] = blocks_of(needs[to], to, holders);
  std::vector<int64_t> given(ranks, 0);  // in all turns
  std::vector<std::vector<BlockTransfer>> turns;
  while (
      std::any_of(left.begin(), left.end(), [](const Blocks& blocks) { return !blocks.empty(); })) {
    turns.emplace_back();
    std::vector<int64_t> gives(ranks, 0);
    for (size_t to = 0; to < ranks; ++to)
      for (int64_t takes = 0; takes < most && !left[to].empty(); ++takes) {
        const auto [file, block] = left[to].back();
        const int64_t from = giver(holders[static_cast<size_t>(file)], given, gives, most);
        if (from < 0) break;
        left[to].pop_back();
        turns.back().push_back({from, static_cast<int64_t>(to), file, block});
        ++given[static_cast<size_t>(from)], ++gives[static_cast<size_t>(from)];
      }
  }
  return turns;
}

}  // namespace lockstep
