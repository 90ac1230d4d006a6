#pragma once

// Internal.

#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {

/// `prefix` + `label`, one copy for all calls of `group`, which must have several ranks.
SharedLabel share_label(const ProcessGroup& group, std::string_view prefix, std::string_view label);

/// Enters a call into the ledger of a group of several ranks; a message gets an identity alone.
CollectiveLedger::Added enter_call(const ProcessGroup::State& group,
                                   const CollectiveOperation& operation, std::string_view label,
                                   int64_t numel, std::string_view dtype);

/// One call of a collective: it is checked, recorded, then started.
class CollectiveCall {
 public:
  using Tensors = std::vector<at::Tensor>;
  using Operation = CollectiveOperation;

  /// `group` and `label` must outlive this object; the work that it starts has its own share of
  /// both.
  CollectiveCall(const ProcessGroup& group, const Operation& operation, std::string_view label)
      : group_(group), operation_(operation), label_(label) {}

  /// The group has one rank: nothing is sent.
  bool alone() const { return group_.size() == 1; }

  /// UsageError that names operation, label and group, unless `condition` holds.
  template <class... Args>
  void check(bool condition, fmt::format_string<Args...> what, Args&&... args) const {
    if (!condition) refuse(fmt::format(what, std::forward<Args>(args)...));
  }
  /// One or more, contiguous, of one dtype and device (the CPU or that of the job), not lazily
  /// conjugated or negated.
  void check_tensors(const Tensors& tensors) const;
  /// output.numel() : input.numel() must be outer : inner.
  void check_sizes(const Tensors& outputs, int64_t outer, const Tensors& inputs,
                   int64_t inner) const;
  void check_position(int64_t position) const;

  /// Enters the call in the ledger of the group, unless it is a message, and shows it to the
  /// observer (an exchange as a send and a receive). Do not call it in a group of one rank.
  void note(const Tensors& inputs);

  /// The identity of the call, valid after note(); the same on all ranks that make it.
  uint64_t identity() const { return identity_; }

  /// Starts it after note(): start(transport of tensors like `example`) -> parts.
  template <class Start>
  Work start(const at::Tensor& example, Start start) const {
    Work::Operation operation;
    operation.group = group_.shared_state();
    operation.called = operation_;
    operation.label = shared_label_;
    operation.on_device = !example.is_cpu();
    operation.bytes = bytes_;
    operation.numel = numel_;
    operation.dtype = at::toString(example.scalar_type());
    Transport& transport = operation.group->communicator->transport(example.device().type());
    return start_operation(std::move(operation), [&] { return start(transport); });
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  const ProcessGroup& group_;
  Operation operation_;
  std::string_view label_;
  SharedLabel shared_label_;
  uint64_t identity_ = 0;
  int64_t bytes_ = 0;
  int64_t numel_ = 0;
};

}  // namespace lockstep
