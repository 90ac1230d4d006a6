#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/core/step_parts.h"

namespace lockstep {

/// The rank that the others wait for, over some iterations.
struct SlowestRank {
  int64_t rank = 0;
  double ms = 0;  ///< of its own work in an iteration: its time excluding waits for other ranks
  /// The part of its own work that exceeds the median of the ranks the most, and by how much.
  StepPart part = StepPart::other;
  double behind_ms = 0;
  StepTimes times = {};  ///< of an iteration
  int64_t first_iteration = 0, last_iteration = 0;
};

/// Compares ranks by their mean times in the same iterations, indexed by rank; at least one rank.
/// Ranks that wait for each other all take the same time, so the slowest is the one with the most
/// work of its own; of equals, the first. The median of an even number of ranks is the lower one.
SlowestRank slowest_rank(const std::vector<StepTimes>& of_ranks);

/// Adds up the times of this rank's iterations between two comparisons.
class RankTimes {
 public:
  void add(int64_t iteration, const StepTimes& times);
  bool empty() const { return count_ == 0; }

  /// Number of values that a rank contributes to the sum over the ranks.
  static int64_t payload_size(int64_t ranks) { return ranks * static_cast<int64_t>(kStepParts); }
  /// Writes this rank's means to its place and zeros to the places of the others, and starts over.
  void take(std::span<double> payload, int64_t rank);

  /// Compares the ranks, given the sum over the ranks of what take() has written; belongs to this
  /// rank's last take().
  SlowestRank compare(std::span<const double> sum) const;

 private:
  StepTimes sum_ = {};
  int64_t count_ = 0;
  int64_t first_ = 0, last_ = 0;              ///< iterations that are in the sum
  int64_t taken_first_ = 0, taken_last_ = 0;  ///< those of the last take()
};

}  // namespace lockstep
