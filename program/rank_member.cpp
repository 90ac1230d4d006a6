#include "lockstep/program/rank_member.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <utility>

#include "lockstep/core/check.h"

namespace lockstep {

int SlotPool::take() {
  if (returned_.empty()) return next_++;
  return returned_.extract(returned_.begin()).value();
}

/// poll() refuses more entries than the process may open files, even those without a descriptor.
std::optional<std::vector<RankMember*>> wait_for_words(std::vector<RankMember>& members,
                                                       int descriptor, int patience) {
  std::vector<pollfd> polled = {{.fd = descriptor, .events = POLLIN, .revents = 0}};
  std::vector<RankMember*> speakers;
  for (RankMember& member : members) {
    if (!member.runs() || !member.channel) continue;
    speakers.push_back(&member);
    polled.push_back({.fd = member.channel->descriptor(), .events = POLLIN, .revents = 0});
  }
  const int found = ::poll(polled.data(), polled.size(), patience);
  if (found == 0) return std::nullopt;
  require<UsageError>(found > 0 || errno == EINTR, "launch: cannot wait for its ranks: {}",
                      std::strerror(errno));
  size_t next = 1;
  std::erase_if(speakers, [&](const RankMember*) { return polled[next++].revents == 0; });
  return speakers;
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
