#pragma once

#include <memory>

namespace lockstep {

/// A communication under way. Keeps its tensors alive. Must be waited for before its tensors are
/// read or written. A collective whose work is dropped while under way is not cancelled; the works
/// of send() and receive() must be kept and waited for, or the message may never be sent.
class [[nodiscard]] Work {
 public:
  struct Operation;

  /// A work that is done.
  Work() = default;
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  /// CPU tensors: blocks until the operation has ended. Tensors on a device: makes its current
  /// stream wait for it. Throws CommunicationError if it failed; the message says, as far as the
  /// ranks can still tell each other, which rank did what instead. On a device a failure shows
  /// later, in the first call of this kind or of ParallelState::check_failures() after the timeout.
  /// A second call does nothing.
  void wait();

  /// Whether wait() would return at once. A send or receive of CPU tensors tells only after wait().
  bool is_completed() const;

 private:
  std::shared_ptr<Operation> operation_;
};

}  // namespace lockstep
