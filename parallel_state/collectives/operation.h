#pragma once

// Internal: how the collectives are started and waited for.

#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/process_group_state.h"
#include "lockstep/parallel_state/work.h"

namespace lockstep {

struct Work::Operation {
  std::shared_ptr<const ProcessGroup::State> group;
  CollectiveOperation called;
  SharedLabel label;
  std::chrono::steady_clock::time_point start = std::chrono::steady_clock::now();
  bool on_device = false;  ///< its tensors are not on the CPU
  Transport::Parts parts = {};
};

/// Posts the failure of `operation`, finds out which rank is lost or did something else, and throws
/// CommunicationError with all that. A rank that is lost comes first.
[[noreturn]] void fail_operation(const Work::Operation& operation, const std::string& reason);

/// Starts `operation`: call() -> its parts.
template <class Call>
Work start_operation(Work::Operation operation, Call call) {
  auto shared = std::make_shared<Work::Operation>(std::move(operation));
  const auto& watch = shared->group->watch;
  if (watch) watch->check();
  try {
    shared->parts = call();
  } catch (const std::exception& error) {
    fail_operation(*shared, reason_of(error, shared->group->ranks));
  }
  if (watch && shared->on_device) watch->add(shared);
  return Work(std::move(shared));
}

}  // namespace lockstep
