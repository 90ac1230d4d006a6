#include "lockstep/parallel_state/communicator.h"

namespace lockstep {

// c10d's destructor would abort what is under way, which other ranks still take part in.
Communicator::~Communicator() {
  if (!other_) return;
  if (failures_->has_failed()) abort();
  if (aborted_) return;
  try {
    group_->getDefaultBackend()->shutdown();
  } catch (const std::exception&) {
    abort();
  }
}

void Communicator::abort() noexcept {
  if (!other_ || aborted_.exchange(true)) return;
  try {
    group_->getDefaultBackend()->abort();
  } catch (const std::exception&) {
    // Nothing is left to give up.
  }
}

}  // namespace lockstep
