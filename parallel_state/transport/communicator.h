#pragma once

// Internal.

#include <atomic>
#include <mutex>
#include <set>
#include <utility>

#include <c10/core/DeviceType.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "lockstep/parallel_state/desync_guard.h"
#include "lockstep/parallel_state/transport.h"

namespace lockstep {

/// The transports of a group's ranks. Shared by all groups of the same ranks.
class Communicator {
 public:
  /// The calls that have been used on the device: messages by sender and receiver, everything else
  /// as kWholeGroup.
  struct Uses {
    using Way = std::pair<int64_t, int64_t>;
    static constexpr Way kWholeGroup = {-1, -1};
    std::mutex mutex;
    std::set<Way> ways, met;  ///< `met`: pairs whose ends have met, the lower position first
  };

  /// `cpu` and `other`: the transports for tensors on the CPU and on other devices; `other` may be
  /// null.
  Communicator(c10::intrusive_ptr<c10d::ProcessGroup> group, std::unique_ptr<Transport> cpu,
               std::unique_ptr<Transport> other, std::shared_ptr<DesyncGuard::NamedLedger> ledger,
               std::shared_ptr<FailureBoard> failures)
      : group_(std::move(group)),
        ledger_(std::move(ledger)),
        failures_(std::move(failures)),
        cpu_(std::move(cpu)),
        other_(std::move(other)) {}
  /// Waits for device operations in progress, unless the job has failed.
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  const c10::intrusive_ptr<c10d::ProcessGroup>& c10d() const { return group_; }
  DesyncGuard::NamedLedger& ledger() const { return *ledger_; }
  /// The transport for tensors on that device.
  Transport& transport(c10::DeviceType device) const {
    return device == c10::DeviceType::CPU ? *cpu_ : *other_;
  }
  /// Null if tensors live on the CPU.
  Transport* device_transport() const { return other_.get(); }
  /// Abandons device operations in progress. May be called from any thread. Never throws.
  void abort() noexcept;
  /// See begin_on_device().
  Uses& uses() { return uses_; }

 private:
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
  std::shared_ptr<DesyncGuard::NamedLedger> ledger_;
  std::shared_ptr<FailureBoard> failures_;
  std::atomic<bool> aborted_ = false;
  std::unique_ptr<Transport> cpu_, other_;
  Uses uses_;
};

}  // namespace lockstep
