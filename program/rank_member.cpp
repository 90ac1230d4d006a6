#include "lockstep/program/rank_member.h"

#include <algorithm>
#include <functional>
#include <utility>

namespace lockstep {

int free_slot(const std::vector<RankMember>& members) {
  const auto is_taken = [&](int slot) {
    return std::any_of(members.begin(), members.end(),
                       [&](const RankMember& m) { return m.runs() && m.slot == slot; });
  };
  int slot = 0;
  while (is_taken(slot)) ++slot;
  return slot;
}

int64_t put_spares_in_place(std::vector<RankMember>& members, int ranks) {
  const auto first_spare = members.begin() + ranks;
  int64_t taken = 0;
  for (auto lost = members.begin(); lost != first_spare; ++lost) {
    if (lost->runs()) continue;
    const auto spare = std::find_if(first_spare, members.end(), std::mem_fn(&RankMember::waits));
    if (spare == members.end()) break;
    std::swap(*lost, *spare);
    ++taken;
  }
  return taken;
}

void put_first(std::vector<RankMember>& members, size_t count) {
  const auto place = [](const RankMember& m) {
    return std::pair(!m.runs() ? 4 : !m.waits ? 3 : m.is_spare ? 2 : m.rank < 0 ? 1 : 0, m.rank);
  };
  const auto sort = [&] {
    std::stable_sort(members.begin(), members.end(),
                     [&](const RankMember& a, const RankMember& b) { return place(a) < place(b); });
  };
  for (RankMember& member : members) member.is_spare = false;
  sort();
  std::vector<std::vector<HeldCopy>> copies;
  for (const RankMember& member : members)
    if (member.waits) copies.push_back(member.copies);
  for (size_t i = 0; i < copies.size(); ++i) members[i].is_spare = true;
  for (const size_t i : ranks_that_go_on(copies, count)) members[i].is_spare = false;
  sort();
}

}  // namespace lockstep
