#include "lockstep/parallel_state/group_user.h"

#include "lockstep/parallel_state/process_group_state.h"

namespace lockstep {

GroupUser::GroupUser(const ProcessGroup& group) : state_(group.shared_state()) {
  if (state_->communicator) ++state_->communicator->users();
}

GroupUser::~GroupUser() {
  if (state_ && state_->communicator) --state_->communicator->users();
}

bool GroupUser::shares() const { return state_->communicator && state_->communicator->users() > 1; }

}  // namespace lockstep
