#include "lockstep/parallel_state/c10d_parts.h"

#include <utility>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/failure_reason.h"
#include "lockstep/parallel_state/nccl_part.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// Null if `work` keeps none, or is of an unknown kind.
WorkPtr without_outputs(const c10d::Work& work) {
  const auto* const known = dynamic_cast<const KeepsOutputs*>(&work);
  return known ? known->without_outputs() : nccl_work_without_outputs(work);
}

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

StreamPart::~StreamPart() {
  if (waited_) return;
  try {
    work_->synchronize();
  } catch (const std::exception&) {
    // An error of the device, whose memory is of no more use.
  }
}

void StreamPart::wait_on_stream() {
  work_->wait();
  WorkPtr with_outputs;  // goes after the lock: a tensor's deleter may run
  const std::lock_guard<std::mutex> lock(mutex_);
  waited_ = true;
  if (WorkPtr rest = without_outputs(*work_)) with_outputs = std::exchange(work_, std::move(rest));
}

bool StreamPart::is_completed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return work_->isCompleted();
}

std::optional<std::string> StreamPart::failure() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::exception_ptr thrown = work_->exception();
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
