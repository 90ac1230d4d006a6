#pragma once

// Internal: what the fronts share.

#include <optional>
#include <utility>
#include <vector>

#include "lockstep/distributed/bucket_info.h"
#include "lockstep/distributed/bucketing.h"
#include "lockstep/distributed/grad_sync_state.h"
#include "lockstep/distributed/gradient_hook.h"
#include "lockstep/distributed/no_sync.h"
#include "lockstep/distributed/notify_on_error.h"

namespace lockstep {

/// The buckets of a set of parameters at work: hooks note the gradients, the state says which
/// buckets may be launched, and these are reduced inside the backward that completes them. A front
/// makes the buckets and names the calls.
///
/// An object that allows unused parameters launches nothing before start() or finish(): a rank that
/// misses a gradient would launch late, after something else that the other ranks do over the same
/// ranks in the meantime, such as another chunk's reduction or an all-to-all of experts.
class GradSync final : private GradientObserver {
 public:
  /// `bucketing` may be empty: then a step reduces nothing. `job`: any group of it; see guarded().
  /// `overlap`, `allow_unused`, `calls`: see GradSyncState.
  GradSync(Bucketing bucketing, const ProcessGroup& job, bool overlap, bool allow_unused,
           GradSyncCalls calls = {});
  GradSync(const GradSync&) = delete;
  GradSync& operator=(const GradSync&) = delete;

  /// Runs a piece of a step. If it throws, the ranks that wait for this one are notified.
  template <class Body>
  void guarded(Body&& body) {
    guard_.run(std::forward<Body>(body));
  }

  /// Launches the rest of the buckets.
  void start();
  /// Launches what is left, and returns when all gradients are reduced and where they should be.
  /// Throws what refuse_frozen() does.
  void finish();
  /// Notes that every parameter received a gradient, in place, that no hook reported.
  void note_backward();
  /// Begins a step: gradients are zero and views of the buffers.
  void zero_grad();
  /// Abandons a step and begins the next, on all ranks: what was not launched is reduced as NaN, so
  /// that all ranks make the same calls.
  void abandon();
  /// Returns when nothing is in progress, whatever the state.
  void settle();
  /// Multiplies the gradients: the reduced ones that this rank holds, or its own terms before the
  /// reduction, those that were replaced included. UsageError for terms in lent memory, and as
  /// refuse_replaced() does.
  void scale(double factor);
  /// After the reduction: UsageError naming the first gradient that was replaced since.
  void refuse_replaced();
  /// See BucketGroup::set_force_all_reduce. For steps that are idle or ready; gradients that are
  /// reduced already stay what they are, and reductions() says how they were reduced.
  void set_force_all_reduce(bool on);

  GradSyncState& state() { return state_; }
  const GradSyncState& state() const { return state_; }
  const Bucketing& bucketing() const { return bucketing_; }
  /// While a guard exists, gradients do not count towards readiness.
  NoSyncGuard no_sync() { return no_sync_.enter(); }
  /// Sets what somebody has to do to reduced gradients before they are final, in every step:
  /// "not divided by the tokens"; nullptr: nothing.
  void set_left_undone(const char* what) { left_undone_ = what; }
  /// Notes that this is done in this step.
  void note_final() { noted_final_ = true; }
  bool noted_final() const { return noted_final_; }
  /// What is left undone in this step; nullptr: nothing.
  const char* left_undone() const { return noted_final_ ? nullptr : left_undone_; }
  /// The reductions, in the order in which buckets are launched.
  std::vector<BucketReduction> reductions() const;
  /// The same with names.
  std::vector<BucketInfo> buckets() const;

 private:
  void on_gradient(int64_t position, bool in_place) override;
  std::string front() const override { return state_.calls().front; }
  std::string unfinished() const override;
  std::string not_final() const override;
  void note_pass();
  void launch(GradSyncState::Launch groups);
  /// If gradients are lent, finishes the groups before `last`: then at most two buckets have memory
  /// that is being reduced.
  void free_all_but(int64_t last);
  void finish_launched();
  /// Does what set_force_all_reduce() has asked for.
  void note_forced();
  void refuse_offloaded(const char* call) const;

  Bucketing bucketing_;
  StepGuard guard_;
  GradSyncState state_;
  bool allows_unused_;
  const char* left_undone_ = nullptr;
  bool noted_final_ = false;
  int64_t freed_ = 0;           ///< bucket groups of this step that were finished early
  std::optional<bool> forced_;  ///< of set_force_all_reduce(), from the next step on
  NoSyncDepth no_sync_;
  std::vector<GradientHook> hooks_;  // last, so that they are destroyed first
};

}  // namespace lockstep
