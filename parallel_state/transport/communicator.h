#pragma once

// Internal.

#include <atomic>

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/desync_guard.h"
#include "lockstep/parallel_state/host_exchange.h"

namespace lockstep {

/// Name of the backend that answers without peers.
inline constexpr char kPlanningBackend[] = "planning";

/// What the ranks of a group communicate with. Shared by all groups of the same ranks.
class Communicator {
 public:
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group,
               std::shared_ptr<DesyncGuard::NamedLedger> ledger, std::chrono::milliseconds timeout)
      : group_(std::move(group)), ledger_(std::move(ledger)) {
    const auto backend = group_->getBackend(c10::kCPU);
    if (backend->getBackendName() != kPlanningBackend) exchange_.emplace(backend, timeout);
  }

  /// See HostExchange::greet().
  void greet(bool offers_memory) {
    if (exchange_) exchange_->greet(offers_memory);
  }

  const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const { return group_; }
  DesyncGuard::NamedLedger& ledger() const { return *ledger_; }
  /// For CPU tensors. nullptr for a planning rank.
  HostExchange* exchange() { return exchange_ ? &*exchange_ : nullptr; }
  /// See GroupUser.
  std::atomic<int64_t>& users() { return users_; }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<DesyncGuard::NamedLedger> ledger_;
  std::optional<HostExchange> exchange_;
  std::atomic<int64_t> users_ = 0;
};

}  // namespace lockstep
