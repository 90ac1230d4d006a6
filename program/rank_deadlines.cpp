#include "lockstep/program/rank_deadlines.h"

#include <algorithm>
#include <climits>
#include <cstdint>

namespace lockstep {
namespace {

using std::chrono::milliseconds;

constexpr std::chrono::seconds kGrace{10};
/// The time that a rank has, beyond its timeout, to say that it has left its round.
constexpr std::chrono::seconds kTimeToLeave{15};
/// The time that a stopped rank has once all others wait or have ended.
constexpr std::chrono::seconds kTimeToContinue{2};
/// The time that ranks have to resume before new spares start, which would slow them down.
constexpr std::chrono::seconds kTimeToResume{10};
/// For ranks that have not reported theirs yet: the longest default of the configuration.
constexpr std::chrono::minutes kLongestTimeout{10};

}  // namespace

void RankDeadlines::begin_meeting(std::optional<milliseconds> timeout) {
  ranks = Clock::now() + timeout.value_or(kLongestTimeout) + kTimeToLeave;
}

void RankDeadlines::begin_end() {
  *this = {};
  ranks = Clock::now() + kGrace;
}

void RankDeadlines::note_suspended(bool awaited) {
  if (!awaited) return suspended.reset();
  if (!suspended) suspended = Clock::now() + kTimeToContinue;
}

void RankDeadlines::await_spares() { spares = Clock::now() + kTimeToResume; }

int RankDeadlines::patience() const {
  Time next;
  for (const Time& time : {ranks, suspended, spares})
    if (time && (!next || *time < *next)) next = time;
  if (!next) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*next - Clock::now());
  return static_cast<int>(std::clamp<int64_t>(left.count(), 0, INT_MAX));
}

bool RankDeadlines::take(Time& time) {
  if (!time || Clock::now() < *time) return false;
  time.reset();
  return true;
}

}  // namespace lockstep
