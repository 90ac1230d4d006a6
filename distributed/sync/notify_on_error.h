#pragma once

// Internal.

#include <mutex>
#include <string>
#include <utility>

#include "lockstep/core/exception_text.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Runs `body`, a part of a call that other ranks make too, and returns its result. If `body`
/// throws, be it an Error or an exception of libtorch or of the caller's own function, the ranks
/// that wait for this one are notified: they raise CommunicationError with the exception's message
/// instead of waiting for the timeout. After that the job's groups cannot be used. `ranks`: a
/// ProcessGroup or a ParallelState of the job.
template <class Ranks, class Body>
decltype(auto) notify_on_error(const Ranks& ranks, Body&& body) {
  try {
    return std::forward<Body>(body)();
  } catch (...) {
    ranks.post_failure(text_of_exception());
    throw;
  }
}

/// The same if there may be no job.
template <class Body>
decltype(auto) notify_on_error(const ParallelState* state, Body&& body) {
  return state ? notify_on_error(*state, std::forward<Body>(body)) : std::forward<Body>(body)();
}

/// The same for a `body` that throws on all ranks of `group` or on none: the ranks outside are
/// notified. If the group is the whole job, its ranks can still use their groups.
template <class Body>
decltype(auto) notify_outside_on_error(const ProcessGroup& group, const ParallelState& state,
                                       Body&& body) {
  if (group.size() == state.world_size()) return std::forward<Body>(body)();
  return notify_on_error(state, std::forward<Body>(body));
}

/// Runs the pieces of a step one at a time, each as notify_on_error() does.
class StepGuard {
 public:
  explicit StepGuard(ProcessGroup group) : group_(std::move(group)) {}

  template <class Body>
  void run(Body&& body) {
    const std::lock_guard<std::mutex> lock(mutex_);
    notify_on_error(group_, [&] {
      try {
        std::forward<Body>(body)();
      } catch (...) {
        if (failure_.empty()) failure_ = text_of_exception();
        throw;
      }
    });
  }

  /// The message of the first piece that threw; empty: none has.
  const std::string& failure() const { return failure_; }

 private:
  ProcessGroup group_;
  std::string failure_;
  std::mutex mutex_;
};

}  // namespace lockstep
