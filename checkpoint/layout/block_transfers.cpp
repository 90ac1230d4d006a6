#include "lockstep/checkpoint/block_transfers.h"

#include <algorithm>
#include <sstream>

#include "lockstep/core/check.h"

namespace lockstep {

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
  std::vector<int64_t> given(ranks, 0);                         // in all turns
  std::vector<int64_t> gives(ranks, most), takes(ranks, most);  // in this turn
  std::vector<std::vector<BlockTransfer>> turns;
  const auto add = [&](const BlockTransfer& transfer) {
    const auto from = static_cast<size_t>(transfer.from), to = static_cast<size_t>(transfer.to);
    if (gives[from] == most || takes[to] == most) {
      turns.emplace_back();
      gives.assign(ranks, 0);
      takes.assign(ranks, 0);
    }
    turns.back().push_back(transfer);
    ++gives[from], ++takes[to], ++given[from];
  };
  for (size_t to = 0; to < ranks; ++to)
    for (const BlockRun& run : needs[to]) {
      const std::vector<int64_t>& have = holders.at(static_cast<size_t>(run.file));
      require<UsageError>(
          !have.empty() && std::find(have.begin(), have.end(), to) == have.end(),
          "transfers: rank {} needs blocks {} to {} of file {}, which the ranks [{}] have; "
          "allowed: one that others have",
          to, run.first, run.last, run.file, fmt::join(have, ", "));
      for (int64_t block = run.first; block < run.last; ++block)
        add({*std::min_element(have.begin(), have.end(),
                               [&](int64_t a, int64_t b) {
                                 return given[static_cast<size_t>(a)] <
                                        given[static_cast<size_t>(b)];
                               }),
             static_cast<int64_t>(to), run.file, block});
    }
  return turns;
}

}  // namespace lockstep
