#pragma once

// Internal.

#include <chrono>
#include <optional>
#include <string>

#include "lockstep/core/error.h"
#include "lockstep/parallel_state/failure_board.h"

namespace lockstep {

/// The data that a wait checks while it waits.
struct Waiting {
  FailureBoard& failures;
  std::chrono::steady_clock::time_point start;  ///< of the operation
  std::chrono::milliseconds timeout;
};

/// A part of an operation in progress. Keeps its tensors' memory alive; on a device, until wait().
class Pending {
 public:
  virtual ~Pending() = default;
  /// CPU tensors: blocks until the part has ended. Other tensors: makes the current stream wait for
  /// it. Throws what made it fail; CommunicationError if a rank has posted a failure, or after
  /// about `timeout`, which begins at `start` or, for a message, when the wait begins. Called once.
  virtual void wait(const Waiting& waiting) = 0;
  /// Another part of the operation has failed, so that this one is not waited for. Once this has
  /// returned, nobody uses its tensors any more, except those of a device or of Gloo's own
  /// collectives.
  virtual void abandon() {}
  /// Whether wait() would return at once; on a device, whether the part has ended there.
  virtual bool is_completed() const = 0;
  /// Why the part has failed, if that is known before wait().
  virtual std::optional<std::string> failure() const { return std::nullopt; }
};

/// The time of a wait is over.
struct TimedOut : CommunicationError {
  TimedOut() : CommunicationError("timed out") {}
};

/// Throws once a rank has posted a failure, and TimedOut about `timeout` after `start`.
inline void check_wait(const Waiting& waiting) {
  if (const auto failure = waiting.failures.find()) throw CommunicationError(failure->text());
  if (waiting.failures.has_failed()) throw CommunicationError("given up");  // by this rank
  if (std::chrono::steady_clock::now() >= waiting.start + waiting.timeout + 2 * kPatience)
    throw TimedOut();
}

/// Calls ended(kPatience), which waits that long and returns whether it is over, until it is.
template <class Ended>
void wait_in_turns(const Waiting& waiting, Ended ended) {
  while (!ended(kPatience)) check_wait(waiting);
}

}  // namespace lockstep
