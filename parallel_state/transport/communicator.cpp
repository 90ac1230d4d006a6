#include "lockstep/parallel_state/communicator.h"

#include <vector>

namespace lockstep {
namespace {

/// On destruction, NCCL's backend joins its watchdog, which sleeps for a while once it has seen a
/// failure. So an aborted backend stays until the process ends.
void keep(const c10::intrusive_ptr<c10d::Backend>& backend) {
  if (backend->getBackendName() != "nccl") return;
  static std::mutex mutex;
  static auto& kept = *new std::vector<c10::intrusive_ptr<c10d::Backend>>;
  const std::lock_guard<std::mutex> lock(mutex);
  kept.push_back(backend);
}

}  // namespace

// c10d's destructor would abort operations under way in which other ranks still take part.
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
    keep(group_->getDefaultBackend());
    group_->getDefaultBackend()->abort();
  } catch (const std::exception&) {
    // Nothing is left to abort.
  }
}

}  // namespace lockstep
