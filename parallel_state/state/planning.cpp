#include "lockstep/parallel_state/planning.h"

#include <map>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_ledger.h"

namespace lockstep {
namespace {

/// What the ranks of a world communicate.
class World {
 public:
  void note(const CollectiveRecord& call) {
    if (call.kind == Kind::send)
      return messages_[{call.rank, call.peer}].sent.push_back(entry_of(call));
    if (call.kind == Kind::receive)
      return messages_[{call.peer, call.rank}].received.push_back(entry_of(call));
    auto& entries = collectives_[call.ranks][call.rank];
    entries.push_back(entry_of(call));
    entries.back().sequence = static_cast<int64_t>(entries.size());
    names_.try_emplace(call.ranks, call.group);
  }

  std::optional<std::string> difference() const {
    for (const auto& [ranks, by_rank] : collectives_) {
      std::vector<RankAccount> accounts;
      for (const int64_t rank : ranks) {
        const auto found = by_rank.find(rank);
        accounts.push_back(
            {.rank = rank,
             .answered = true,
             .entries = found == by_rank.end() ? std::vector<CollectiveEntry>() : found->second,
             .elsewhere = ""});
      }
      if (const auto text = first_difference(accounts))
        return fmt::format("group {} {}: {}", names_.at(ranks), ranks, *text);
    }
    for (const auto& [pair, messages] : messages_)
      if (const auto text = messages.difference(pair.first, pair.second)) return text;
    return std::nullopt;
  }

 private:
  using Kind = CollectiveRecord::Kind;

  /// From one rank to another.
  struct Messages {
    std::vector<CollectiveEntry> sent, received;

    std::optional<std::string> difference(int64_t from, int64_t to) const {
      for (size_t i = 0; i < std::max(sent.size(), received.size()); ++i) {
        if (i < sent.size() && i < received.size() && same(sent[i], received[i])) continue;
        return fmt::format("message {} from rank {} to rank {}: {}; {}", i + 1, from, to,
                           i < sent.size() ? sent[i].to_string() : "nothing is sent",
                           i < received.size() ? received[i].to_string() : "nothing is received");
      }
      return std::nullopt;
    }
    static bool same(CollectiveEntry a, const CollectiveEntry& b) {
      a.operation = b.operation;
      return a.same_operation(b);
    }
  };

  static CollectiveEntry entry_of(const CollectiveRecord& call) {
    CollectiveEntry entry;
    entry.operation = call.operation;
    entry.label = call.label;
    entry.numel = call.kind == Kind::uneven_collective ? -1 : call.numel;
    entry.dtype = call.dtype;
    return entry;
  }

  std::map<RankList, std::map<int64_t, std::vector<CollectiveEntry>>> collectives_;
  std::map<RankList, std::string> names_;
  std::map<std::pair<int64_t, int64_t>, Messages> messages_;
};

}  // namespace

std::optional<std::string> verify_collectives(
    const ParallelSizes& sizes, const std::function<void(const ParallelState&)>& body) {
  const RankGrids check(sizes);
  World world;
  for (int64_t rank = 0; rank < sizes.world_size; ++rank) try {
      body(ParallelState::planning_rank(sizes, rank,
                                        [&](const CollectiveRecord& call) { world.note(call); }));
    } catch (const std::exception& error) {
      fail<Error>("planning rank {} of {}: {}", rank, sizes.world_size, error.what());
    }
  return world.difference();
}

}  // namespace lockstep
