#pragma once

#include <memory>

namespace lockstep {

/// A communication in progress. Keeps its tensors alive. Wait for it before you read or write its
/// tensors. Dropping the Work of a collective in progress does not cancel the collective. The Work
/// of a send() or receive() must be kept and waited for, or the message may never be sent.
class [[nodiscard]] Work {
 public:
  struct Operation;

  /// A completed operation.
  Work() = default;
  explicit Work(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}

  /// CPU tensors: blocks until the operation has ended. Device tensors: makes the device's current
  /// stream wait for the operation. Throws CommunicationError if it failed; if the ranks can still
  /// reach each other, the message says which rank did what instead. On a device a failure is
  /// reported later, by the first call of wait() or ParallelState::check_failures() after the
  /// timeout. A second wait() does nothing.
  void wait();

  /// Whether wait() would return at once. For a send or receive of CPU tensors over Gloo it is true
  /// only after wait().
  bool is_completed() const;

 private:
  std::shared_ptr<Operation> operation_;
};

}  // namespace lockstep
