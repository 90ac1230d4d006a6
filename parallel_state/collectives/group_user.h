#pragma once

// Internal.

#include <memory>

#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Something on this rank that may start collectives over a group at any time, for example inside
/// backward. It counts as a user of the group's ranks as long as it lives.
class GroupUser {
 public:
  explicit GroupUser(const ProcessGroup& group);
  ~GroupUser();
  GroupUser(GroupUser&&) noexcept = default;
  GroupUser& operator=(GroupUser&&) = delete;

  /// Whether there are others on this rank, of this group or of another one of the same ranks.
  /// False for a group of one rank.
  bool shares() const;

 private:
  std::shared_ptr<const ProcessGroup::State> state_;
};

}  // namespace lockstep
