#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "lockstep/core/step_parts.h"

namespace lockstep {

/// The rank for which the others wait, over some iterations.
struct SlowestRank {
  int64_t rank = 0;
  double ms = 0;  ///< of its own work in an iteration: its time without waiting for other ranks
  /// The part of its own work that is most above the median of the ranks, and by how much.
  StepPart part = StepPart::other;
  double behind_ms = 0;
  StepTimes times = {};  ///< of an iteration
  int64_t first_iteration = 0, last_iteration = 0;
};

/// Compares ranks by their mean times of the same iterations, indexed by rank; at least one. Ranks
/// that wait for each other all take as long, so the slowest is the one with the most work of its
/// own; of equals the first. The median of an even number of ranks is the lower one.
SlowestRank slowest_rank(const std::vector<StepTimes>& of_ranks);

/// Adds up the times of this rank's iterations between two comparisons.
class RankTimes {
 public:
  void add(int64_t iteration, const StepTimes& times);
  bool empty() const { return count_ == 0; }

  /// Numbers that a rank contributes to the sum over the ranks.
  static int64_t payload_size(int64_t ranks) { return ranks * static_cast<int64_t>(kStepParts); }
  /// Writes this rank's means to its place and zeros to those of the others, and begins anew.
  void take(std::span<double> payload, int64_t rank);

  /// Of a sum over the ranks of what take() has written; of this rank's last take().
  SlowestRank compare(std::span<const double> sum) const;

 private:
  StepTimes sum_ = {};
  int64_t count_ = 0;
  int64_t first_ = 0, last_ = 0;              ///< iterations that are in the sum
  int64_t taken_first_ = 0, taken_last_ = 0;  ///< those of the last take()
};

}  // namespace lockstep
