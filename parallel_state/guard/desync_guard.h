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

/// Finds out which rank did what instead when ranks are out of step: it holds a ledger for each
/// group of this rank, publishes it to the other ranks when something has failed, and reads what
/// they publish. It uses the store of the rendezvous, because the groups are unusable by then.
class DesyncGuard {
 public:
  DesyncGuard(std::shared_ptr<FailureBoard> board, int64_t rank);
  /// Tells the other ranks that this one ends; call it before its groups are destroyed, so that no
  /// rank considers it lost. Never throws.
  void say_end() const noexcept;

  /// A group's ledger and the name that all its members know it by.
  struct NamedLedger : CollectiveLedger {
    explicit NamedLedger(std::string with_name) : name(std::move(with_name)) {}
    const std::string name;
  };
  std::shared_ptr<NamedLedger> ledger(const std::string& name);

  /// The training step of the following entries.
  void set_step(int64_t step) { step_ = step; }
  int64_t step() const { return step_; }

  /// Why an operation failed, as far as the ranks can still tell.
  struct Explanation {
    std::string culprit;     ///< "rank 1 has exited"; empty if no rank is lost
    std::string reason;      ///< what another rank has posted, else the reason that was given
    std::string difference;  ///< the first one between the ranks; empty if they agree
    std::string failed;      ///< "rank 1: no text": it failed on its own, which explains everything
  };

  /// Call it when an operation over `ranks` has failed; `waits_for` says which operation. Looks for
  /// lost ranks, which takes at most 1.25 s, and posts the failure. If none is lost, it tells the
  /// others what this rank has done, and waits up to two seconds for what they report for this
  /// `ledger`, which is null for a group that is not connected. Never throws.
  Explanation explain(const RankList& ranks, const NamedLedger* ledger,
                      const std::string& waits_for, const std::string& reason) const noexcept;

  /// Whether an operation of this rank has failed.
  bool has_failed() const { return has_failed_; }

 private:
  void publish(const std::string& elsewhere) const;
  FailureBoard::Lost find_lost(const RankList& ranks) const;
  static Explanation explained_by(const Failure& posted);
  Explanation without_store(const std::string& reason) const;
  std::string difference(const RankList& ranks, const NamedLedger& ledger) const;
  std::string shared_difference(const RankList& ranks, const NamedLedger& ledger) const;

  std::shared_ptr<FailureBoard> board_;
  int64_t rank_;
  std::atomic<int64_t> step_ = 0;
  mutable std::atomic<bool> has_failed_ = false;  ///< what it then published stays
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<NamedLedger>> ledgers_;
};

}  // namespace lockstep
