#pragma once

// Internal.

#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {

/// One call of a collective: checked, noted, then started.
class CollectiveCall {
 public:
  using Tensors = std::vector<at::Tensor>;

  CollectiveCall(const ProcessGroup& group, std::string operation, std::string_view label)
      : group_(group), operation_(std::move(operation)), label_(label) {}

  /// The group has one rank: nothing is sent.
  bool alone() const { return group_.size() == 1; }

  /// UsageError that names operation, label and group, unless `condition` holds.
  template <class... Args>
  void check(bool condition, fmt::format_string<Args...> what, Args&&... args) const {
    if (!condition) refuse(fmt::format(what, std::forward<Args>(args)...));
  }
  /// One or more, contiguous, of one dtype and device.
  void check_tensors(const Tensors& tensors) const;
  /// output.numel() : input.numel() must be outer : inner.
  void check_sizes(const Tensors& outputs, int64_t outer, const Tensors& inputs,
                   int64_t inner) const;
  void check_position(int64_t position) const;

  using Kind = CollectiveRecord::Kind;
  /// Enters the call in the ledger of the group and shows it to the observer. `peer`: of a message,
  /// its position in the group.
  void note(const Tensors& inputs, Kind kind = Kind::collective, int64_t peer = -1);

  /// Of the call, from note() on; the same on all ranks that make it.
  uint64_t identity() const { return identity_; }

  /// Starts it: start(transport of tensors like `example`) -> parts.
  template <class Start>
  Work start(const at::Tensor& example, Start start) const {
    Work::Operation operation;
    operation.group = group_.shared_state();
    operation.name = operation_;
    operation.label = label_;
    Transport& transport = operation.group->communicator->transport(example.device().type());
    return start_operation(std::move(operation), [&] { return start(transport); });
  }

 private:
  [[noreturn]] void refuse(const std::string& what) const;

  const ProcessGroup& group_;
  std::string operation_;
  std::string_view label_;
  uint64_t identity_ = 0;
};

}  // namespace lockstep
