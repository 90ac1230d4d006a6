#include "lockstep/parallel_state/process_group.h"

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/process_group_state.h"

namespace lockstep {

const std::string& ProcessGroup::name() const { return state_->name; }

const std::vector<int64_t>& ProcessGroup::ranks() const { return state_->ranks; }

int64_t ProcessGroup::rank() const { return state_->rank; }

std::chrono::milliseconds ProcessGroup::timeout() const { return state_->timeout; }

std::string ProcessGroup::to_string() const {
  constexpr size_t kMaxListed = 16;
  if (ranks().size() <= kMaxListed) return fmt::format("{} {}", name(), ranks());
  return fmt::format("{} [{}, ... {} ranks ... {}]", name(), ranks().front(), ranks().size(),
                     ranks().back());
}

void ProcessGroup::post_failure(const std::string& message) const noexcept {
  state_->failures->post(message);
}

c10d::ProcessGroup* ProcessGroup::c10d_group() const {
  return state_->communicator ? state_->communicator->c10d().get() : nullptr;
}

}  // namespace lockstep
