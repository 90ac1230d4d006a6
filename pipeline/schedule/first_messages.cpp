#include "lockstep/pipeline/first_messages.h"

#include <algorithm>
#include <set>

#include "lockstep/core/check.h"

namespace lockstep {
namespace {

using Direction = std::pair<int64_t, int64_t>;  // from, to

/// The first message of a direction at one of its ends.
struct FirstMessage {
  Direction direction;
  int64_t peer;
  std::string what;
};

/// The first messages of one rank, in the order in which its host makes them.
class FirstMessages {
 public:
  explicit FirstMessages(int64_t rank) : rank_(rank) {}

  void add(bool sends, int64_t peer, const std::string& what) {
    const Direction direction = sends ? Direction(rank_, peer) : Direction(peer, rank_);
    if (seen_.insert(direction).second) list_.push_back({direction, peer, what});
  }

  void add(const PipelineStep& step) {
    add(step.kind == PipelineStep::Kind::send, step.peer, to_string(step));
  }

  const FirstMessage* next() const { return done_ < list_.size() ? &list_[done_] : nullptr; }
  void go_on() { ++done_; }

 private:
  int64_t rank_;
  std::set<Direction> seen_;
  std::vector<FirstMessage> list_;
  size_t done_ = 0;
};

FirstMessages first_messages(int64_t rank, const StepLists& all, const RankPairs& connected) {
  FirstMessages messages(rank);
  for (const auto& [first, second] : connected) {
    if (rank != first && rank != second) continue;
    const int64_t peer = rank == first ? second : first;
    for (const bool forth : {true, false})
      messages.add((rank == first) == forth, peer, fmt::format("connecting with rank {}", peer));
  }
  const std::vector<PipelineStep>& steps = all[static_cast<size_t>(rank)];
  const auto early = early_receives(all, rank);
  for (size_t i = 0; i < steps.size(); ++i) {
    for (const size_t receive : early[i]) messages.add(steps[receive]);
    if (steps[i].kind == PipelineStep::Kind::send) messages.add(steps[i]);
  }
  return messages;
}

/// Returns whether both ends of the next message of `rank` have come to it; if so, both go on.
bool meet(std::vector<FirstMessages>& ranks, size_t rank) {
  const FirstMessage* const mine = ranks[rank].next();
  if (mine == nullptr) return false;
  FirstMessages& peer = ranks.at(static_cast<size_t>(mine->peer));
  const FirstMessage* const theirs = peer.next();
  if (theirs == nullptr || theirs->direction != mine->direction) return false;
  ranks[rank].go_on();
  peer.go_on();
  return true;
}

}  // namespace

RankPairs message_pairs(const StepLists& steps) {
  std::set<std::pair<int64_t, int64_t>> pairs;
  for (size_t r = 0; r < steps.size(); ++r)
    for (const PipelineStep& step : steps[r]) {
      const auto rank = static_cast<int64_t>(r);
      if (step.kind != PipelineStep::Kind::compute) pairs.insert(std::minmax(rank, step.peer));
    }
  return {pairs.begin(), pairs.end()};
}

void check_first_messages(const StepLists& steps, const RankPairs& connected) {
  std::vector<FirstMessages> ranks;
  for (size_t r = 0; r < steps.size(); ++r)
    ranks.push_back(first_messages(static_cast<int64_t>(r), steps, connected));
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t r = 0; r < ranks.size(); ++r)
      while (meet(ranks, r)) moved = true;
  }
  std::vector<std::string> stuck;
  for (size_t r = 0; r < ranks.size(); ++r)
    if (const FirstMessage* const next = ranks[r].next())
      stuck.push_back(fmt::format("rank {} is stuck at its first message {} rank {}, {}", r,
                                  next->direction.first == next->peer ? "from" : "to", next->peer,
                                  next->what));
  require<UsageError>(stuck.empty(), "the hosts wait for each other: {}", fmt::join(stuck, "; "));
}

}  // namespace lockstep
