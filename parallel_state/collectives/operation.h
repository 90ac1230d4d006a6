#pragma once

// Internal: how the collectives are started and waited for.

#include "lockstep/core/trace_scope.h"
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
  int64_t bytes = 0;       ///< of this rank's input
  int64_t numel = 0;       ///< elements of it; -1 where ranks may differ
  const char* dtype = "";
  uint32_t number = 0;  ///< for the rank's ProgramRecorder, if it has one
  Transport::Parts parts = {};
};

/// "all_reduce (sum) of bucket 3 over group dp [0, 1]"
std::string describe(const Work::Operation& operation);
/// The same and the bytes, for traces.
std::string trace_name(const Work::Operation& operation);

/// Posts the failure of `operation`, finds out which rank is lost or did something else, and throws
/// CommunicationError with all that. A rank that is lost comes first.
[[noreturn]] void fail_operation(const Work::Operation& operation, const std::string& reason);

/// Before an operation on a device is started. The first use of a group, and of each direction of a
/// pair, blocks the host within c10d until the others come. If this creates a communicator, nothing
/// can interrupt it, so its members first meet in the store; the rest is watched. Throws
/// CommunicationError if a member has not come within the group's timeout or has gone, or if a rank
/// has posted a failure.
void begin_on_device(const std::shared_ptr<Work::Operation>& operation);

/// Runs call() under the operation's name in traces. On a device the name marks the launch,
/// elsewhere the work of the thread that does it.
template <class Call>
Transport::Parts call_traced(const Work::Operation& operation, Call call) {
  const auto name = [&] { return trace_name(operation); };
  if (operation.on_device) {
    const TraceScope scope(name);
    return call();
  }
  const TraceName for_workers(name);
  const TraceSilence without_names_of_c10d(trace_is_recording());
  return call();
}

/// Starts `operation`: call() -> its parts.
template <class Call>
Work start_operation(Work::Operation operation, Call call) {
  auto shared = std::make_shared<Work::Operation>(std::move(operation));
  if (shared->group->recorder) shared->number = shared->group->recorder->on_start(*shared);
  DeviceWatch* const watch = shared->group->watch.get();
  if (watch) watch->check();
  try {
    if (watch && shared->on_device) begin_on_device(shared);
    shared->parts = call_traced(*shared, call);
  } catch (const std::exception& error) {
    if (watch) watch->forget(*shared);
    fail_operation(*shared, reason_of(error, shared->group->ranks));
  }
  if (watch && shared->on_device) watch->add(shared);
  return Work(std::move(shared));
}

}  // namespace lockstep
