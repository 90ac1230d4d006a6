#pragma once

// Internal.

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "lockstep/parallel_state/collective_ledger.h"
#include "lockstep/parallel_state/failure_board.h"
#include "lockstep/parallel_state/rank_generator.h"

namespace lockstep {

/// Finds out which rank did what instead, when ranks have lost step: holds a ledger for each group
/// of this rank, tells the other ranks what is in it when something has failed, and reads what they
/// tell. Through the store of the rendezvous, because the groups are unusable by then.
class DesyncGuard {
 public:
  DesyncGuard(std::shared_ptr<FailureBoard> board, int64_t rank);
  /// Tells the other ranks that this one has ended.
  ~DesyncGuard();

  /// A group's ledger and the name under which all its members know it.
  struct NamedLedger : CollectiveLedger {
    explicit NamedLedger(std::string with_name) : name(std::move(with_name)) {}
    const std::string name;
  };
  std::shared_ptr<NamedLedger> ledger(const std::string& name);

  /// The training step, for the entries that follow.
  void set_step(int64_t step) { step_ = step; }
  int64_t step() const { return step_; }

  /// Called where an operation over `ranks` has failed; `waits_for` says which. Tells the others,
  /// waits up to two seconds for what they tell, and returns the first difference between the
  /// ranks, or an empty text where they agree. Never throws.
  std::string explain(const RankList& ranks, const NamedLedger& ledger,
                      const std::string& waits_for) const noexcept;

 private:
  void publish(const std::string& elsewhere) const;

  std::shared_ptr<FailureBoard> board_;
  int64_t rank_;
  std::atomic<int64_t> step_ = 0;
  mutable std::atomic<bool> has_failed_ = false;  ///< what it then told stays
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<NamedLedger>> ledgers_;
};

}  // namespace lockstep
