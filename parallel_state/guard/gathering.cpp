#include "lockstep/parallel_state/gathering.h"

#include <algorithm>
#include <thread>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_board.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::string here_key(int64_t rank) { return fmt::format("here/{}", rank); }

/// The store answers some tens of thousands of requests a second.
milliseconds longest_pause(int64_t ranks) {
  return std::clamp(milliseconds(ranks / 20), milliseconds(20), milliseconds(2000));
}

}  // namespace

bool wait_for_key(c10d::Store& store, const std::string& key, int64_t ranks,
                  Clock::time_point deadline, const std::function<bool()>& give_up) {
  milliseconds pause{1};
  auto look = Clock::now() + kPatience;
  while (!store.check({key})) {
    const auto now = Clock::now();
    if (now >= deadline) return false;
    if (give_up && now >= look) {
      if (give_up()) return false;
      look = now + kPatience;
    }
    std::this_thread::sleep_for(
        std::min<Clock::duration>(pause, std::max<Clock::duration>(deadline - now, {})));
    pause = std::min(2 * pause, longest_pause(ranks));
  }
  return true;
}

void note_here(c10d::Store& store, int64_t rank) {
  store.set(here_key(rank), std::vector<uint8_t>{1});
}

AbsentRanks absent_ranks(c10d::Store& store, const RankList& ranks,
                         const std::function<bool()>& give_up) {
  constexpr size_t kAtOnce = 256, kMostListed = 10;
  RankList listed;
  AbsentRanks absent;
  for (size_t begin = 0; begin < ranks.size(); begin += kAtOnce) {
    const size_t end = std::min(begin + kAtOnce, ranks.size());
    std::vector<std::string> keys;
    for (size_t i = begin; i < end; ++i) keys.push_back(here_key(ranks[i]));
    if (store.check(keys)) continue;
    if (give_up && give_up()) break;
    for (size_t i = begin; i < end; ++i) {
      if (store.check({keys[i - begin]})) continue;
      ++absent.count;
      if (listed.size() < kMostListed) listed.push_back(ranks[i]);
    }
  }
  absent.text = fmt::format("rank{} {}{}", absent.count == 1 ? "" : "s", fmt::join(listed, ", "),
                            absent.count > static_cast<int64_t>(listed.size()) ? ", ..." : "");
  return absent;
}

std::optional<std::string> gather(c10d::Store& store, const RankList& ranks, int64_t rank,
                                  Clock::time_point deadline,
                                  const std::function<std::optional<std::string>()>& failure) {
  const auto size = static_cast<int64_t>(ranks.size());
  note_here(store, rank);
  if (store.add("arrived", 1) == size) store.set("all here", std::vector<uint8_t>{1});
  std::optional<std::string> found;
  const auto look = [&] { return (found = failure()).has_value(); };
  if (wait_for_key(store, "all here", size, deadline, look)) return std::nullopt;
  if (found || look()) return found;
  const AbsentRanks absent = absent_ranks(store, ranks);
  if (absent.count == 0) return std::nullopt;  // the last one has just come
  return absent.text + " did not arrive to connect it";
}

}  // namespace lockstep
