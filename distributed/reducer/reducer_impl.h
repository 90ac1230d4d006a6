#pragma once

// Internal: what the sources of the Reducer share.

#include <utility>

#include "lockstep/core/error.h"
#include "lockstep/distributed/grad_sync_state.h"
#include "lockstep/distributed/gradient_hook.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/reducer.h"
#include "lockstep/distributed/reducer_bucket.h"
#include "lockstep/distributed/reducer_statistics.h"
#include "lockstep/distributed/reducer_usage.h"

namespace lockstep {

/// Throws if descriptions require what a Reducer cannot do.
using DescriptionChecks = std::function<void(const std::vector<NamedParameter>&)>;

struct Reducer::Impl final : GradientObserver {
  /// Where a parameter is stored.
  struct Place {
    ReducerBucket* bucket = nullptr;
    size_t index = 0;
  };

  /// Inside join().
  struct Joining {
    ReducerJoinOptions options;
    int64_t iterations = 0;  ///< of this rank
    bool announced = false;  ///< the ranks that wait take part in the iteration that is open
    bool ended_early = false;
  };

  Impl(std::vector<NamedParameter> parameters, std::vector<NamedParameter> module_buffers,
       const ProcessGroup& process_group, const ReducerOptions& reducer_options,
       const DescriptionChecks& description_checks);

  // reducer.cpp
  void build_buckets(std::vector<std::vector<size_t>> indices);

  // reducer_iteration.cpp: what happens between two forwards.
  void prepare_for_forward();
  void compare_hooks();
  void rebuild_if_due();
  void prepare_for_backward(const std::vector<at::Tensor>& outputs);
  void forget_gone();
  bool note_prepared(const std::vector<at::Tensor>& outputs);
  bool watch(const std::vector<at::Tensor>& outputs);
  void note_begun(std::shared_ptr<OutputGraphs> backward);
  void skip_unused_buckets();
  void on_gradient(int64_t position, bool in_place) override;
  std::string front() const override { return "Reducer"; }
  std::string unfinished() const override;
  void refuse_late(int64_t position) const;
  void note_without_reduction(size_t param);
  void arm(int64_t position);
  bool completes(size_t param, bool has_gradient);
  void mark_unused();
  void launch(GradSyncState::Launch buckets);
  void end_backward_later();
  void end_backward();
  void complete_missing();
  void finish_reductions();
  void finalize();
  void refuse_open() const;
  void refuse_without_gradients();
  std::string missing_text() const;

  // reducer_join.cpp
  int64_t count_active(bool active);
  void refuse_announced() const;
  void meet_waiting_ranks();
  void shadow_iteration();
  int64_t join(const std::function<void()>& iterations);

  bool finds_unused() const { return options.find_unused_parameters && !options.static_graph; }
  /// Whether this rank learns how often each parameter gets a gradient. The first iteration that it
  /// runs need not be the first one that is reduced: inside join() it may have waited for others.
  bool counts_firings() const { return options.static_graph && expected.empty(); }
  /// Whether the ranks count in this iteration who uses which parameter.
  bool counts_uses() const { return finds_unused() || (options.static_graph && reductions == 0); }
  bool tracks_usage() const { return usage != nullptr; }
  bool is_skipped(size_t bucket) const { return !skipped.empty() && skipped[bucket]; }

  /// Runs a piece of an iteration. If it throws, the ranks that wait for this one are notified.
  template <class Body>
  void guarded(Body&& body) {
    guard.run(std::forward<Body>(body));
  }

  ReducerOptions options;
  ProcessGroup group;
  StepGuard guard;
  std::vector<NamedParameter> untrained;  ///< module buffers and frozen parameters to broadcast
  std::vector<NamedParameter> params;
  std::vector<NamedParameter> frozen;
  std::vector<bool> sparse;
  std::shared_ptr<CommHook> hook;
  bool hooks_compared = false;  ///< those of all ranks
  std::map<std::string, at::Tensor> sparse_rows;

  std::vector<std::vector<size_t>> indices;
  std::vector<std::unique_ptr<ReducerBucket>> buckets;
  std::vector<Place> places;
  std::unique_ptr<GradSyncState> sync;
  bool rebuilt = false;
  std::vector<int64_t> initial_bytes;  ///< of the buckets before they were rebuilt

  int64_t iteration = 0;
  int64_t reductions = 0;  ///< iterations that were reduced, of all ranks
  /// Backwards that were prepared and are not reduced yet.
  std::vector<std::shared_ptr<OutputGraphs>> prepared;
  /// The one of them that has begun: its output was reached first. Backward also reaches the
  /// outputs of others that it contains, and these may still run by themselves.
  std::shared_ptr<OutputGraphs> running;
  size_t searched = 0;    ///< length of `prepared` at the last search of graphs
  bool armed = false;     ///< an iteration is open
  bool any_armed = true;  ///< one was open since the last forward or finalize_backward()
  bool all_launched = false;
  bool ends_later = false;  ///< the running backward will call end_backward()
  bool plain = true;        ///< a gradient needs no more than to be counted
  NoSyncDepth no_sync;

  std::vector<int64_t> ready_order;  ///< of the first iteration
  std::vector<int32_t> fired;        ///< with static_graph: gradients of this iteration
  std::vector<int32_t> expected;     ///< those of this rank's first; empty until it is over

  std::unique_ptr<ParameterUsage> usage;  ///< with find_unused_parameters or static_graph
  std::vector<bool> skipped;              ///< buckets, with skip_all_reduce_unused_params
  std::vector<bool> last_unused;
  bool unused_changed = false;

  std::optional<Joining> joining;
  int64_t divisor;
  int64_t buckets_reduced = 0;  ///< in the last iteration
  ReducerStatistics statistics;
  std::shared_ptr<int> alive = std::make_shared<int>(0);
  std::vector<GradientHook> hooks;  // last, so that they are destroyed first
};

}  // namespace lockstep
