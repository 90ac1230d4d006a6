#pragma once

#include <gtest/gtest.h>

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/tests/support/recording_backend.h"

/// Checks whether the collectives of all ranks can run one after the other.
namespace lockstep::testing {

/// A collective call: its ranks, and how many calls these ranks made together before it.
using JointCall = std::pair<std::vector<int64_t>, size_t>;

inline std::vector<JointCall> joint_calls(const std::vector<CollectiveRecord>& of_rank) {
  std::map<std::vector<int64_t>, size_t> counts;
  std::vector<JointCall> calls;
  for (const CollectiveRecord& call : of_rank) {
    const std::vector<int64_t> ranks(call.ranks.begin(), call.ranks.end());
    calls.emplace_back(ranks, counts[ranks]++);
  }
  return calls;
}

/// Expects that all members of a group make the same calls with the same labels, and that one order
/// of all collectives agrees with every rank's own order. Then no two ranks ever wait for each
/// other in different collectives, however few can be in flight at once.
inline void expect_one_order(const CollectiveLog& log, int64_t world, const std::string& what) {
  std::vector<std::vector<JointCall>> left;
  std::map<JointCall, std::set<std::string>> texts;
  for (int64_t rank = 0; rank < world; ++rank) {
    const std::vector<CollectiveRecord> of_rank = log.of_rank(rank);
    left.push_back(joint_calls(of_rank));
    for (size_t i = 0; i < of_rank.size(); ++i)
      texts[left.back()[i]].insert(of_rank[i].operation + " of " + of_rank[i].label);
  }
  for (const auto& [call, said] : texts)
    EXPECT_EQ(said.size(), 1u) << what << ": " << *said.begin() << " is " << *said.rbegin()
                               << " on another rank";
  std::vector<size_t> next(static_cast<size_t>(world), 0);
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t rank = 0; rank < next.size(); ++rank) {
      if (next[rank] == left[rank].size()) continue;
      const JointCall call = left[rank][next[rank]];
      bool all_here = true;
      for (const int64_t member : call.first) {
        const auto m = static_cast<size_t>(member);
        all_here = all_here && next[m] < left[m].size() && left[m][next[m]] == call;
      }
      if (!all_here) continue;
      for (const int64_t member : call.first) ++next[static_cast<size_t>(member)];
      moved = true;
    }
  }
  for (size_t rank = 0; rank < next.size(); ++rank)
    EXPECT_EQ(next[rank], left[rank].size()) << what << ": rank " << rank << " is stuck";
}

}  // namespace lockstep::testing
