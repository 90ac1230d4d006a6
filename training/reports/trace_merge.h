#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// The result of merge_traces().
struct TraceMerge {
  int64_t ranks = 0;
  int64_t events = 0;
  std::vector<std::string> notes;  ///< ranks that are missing, clocks that could not be compared
};

/// Merges FOLDER/rank_R.json of all ranks into one trace for Perfetto: process R is "rank R", its
/// devices follow it. All times are on the clock of the lowest rank: clocks of other hosts are
/// compared through collectives that ended on both (see clock_offsets()). Needs memory for one file
/// of at most 64 MiB and for the end times of collectives; larger files are mapped. FileError: no
/// trace, a damaged one, two of one rank, traces of runs of different sizes, or `output` cannot be
/// written.
TraceMerge merge_traces(const std::string& folder, const std::string& output);

}  // namespace lockstep
