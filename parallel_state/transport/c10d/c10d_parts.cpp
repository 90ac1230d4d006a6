#include "lockstep/parallel_state/c10d_parts.h"

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_reason.h"

namespace lockstep {
namespace {

/// Waits up to `patience`. Returns whether the work has ended.
bool ended_within(c10d::Work& work, std::chrono::milliseconds patience) {
  try {
    work.wait(patience);
    return true;
  } catch (const std::exception&) {
    if (!work.isCompleted()) return false;
    if (work.isSuccess()) return true;
    throw;
  }
}

}  // namespace

void StreamPart::wait_on_stream() { work().wait(); }

std::optional<std::string> StreamPart::failure() const {
  const std::exception_ptr thrown = work().exception();
  if (!thrown) return std::nullopt;
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return reason_of(error);  // NCCL's errors have libtorch's stack trace
  }
}

void CollectivePart::wait(const Waiting& waiting) {
  wait_in_turns(waiting, [this](auto patience) { return ended_within(work(), patience); });
}

void MessagePart::wait(const Waiting& waiting) {
  if (work().isCompleted()) return;
  const FailureBoard::Watch watch(waiting.failures, [this] { work().abort(); });
  require<CommunicationError>(work().wait(waiting.timeout), "given up");
}

}  // namespace lockstep
