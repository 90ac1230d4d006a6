#pragma once

#include <chrono>
#include <optional>

namespace lockstep {

/// When a launcher acts although nothing happens to its ranks.
class RankDeadlines {
 public:
  using Clock = std::chrono::steady_clock;
  using Time = std::optional<Clock::time_point>;  ///< unset: never

  Time ranks;      ///< those that must end, or leave their round, have had their time
  Time suspended;  ///< those that are suspended have had theirs
  Time spares;     ///< new ones replace those that took part

  /// The ranks leave their round; `timeout` is how long they wait for each other, if they have
  /// reported it.
  void begin_meeting(std::optional<std::chrono::milliseconds> timeout);
  /// The ranks end; nothing else is due any more.
  void begin_end();
  /// Whether the launcher waits only for ranks that are suspended. Call it after each change.
  void note_suspended(bool awaited);
  /// Spares took part.
  void await_spares();

  /// How long poll() is to wait for the first of the times: milliseconds, rounded up, but no more
  /// than it can; -1 for ever.
  int patience() const;
  /// Whether `time` has come; it is then unset.
  static bool take(Time& time);
};

}  // namespace lockstep
