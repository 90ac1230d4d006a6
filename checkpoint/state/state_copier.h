#pragma once

// Internal.

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/checkpoint/state_copies.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Copies the state into the memory of the ranks: each rank keeps its own share of it, which is
/// what CheckpointSaver would have it write, and `replicas` other ranks keep a copy of that share;
/// see copy_holders(). A rank has two such copies in memory, each with its own share and the shares
/// that it keeps for others.
class StateCopier {
 public:
  /// `round`: that of the ranks; see CopyId. If there are fewer than `replicas` other ranks, there
  /// are fewer copies.
  StateCopier(const ParallelState& parallel_state, StateCopies& into, int64_t replicas,
              int64_t round);
  ~StateCopier();
  StateCopier(const StateCopier&) = delete;
  StateCopier& operator=(const StateCopier&) = delete;

  /// Copies `tensors`, which must have the same names and parts every time, as the state after
  /// progress.iteration. Collective over the world: one all_to_all for each replica and, before the
  /// first copy, the plan, as texts. Between two calls there must be another collective over the
  /// world, such as the sum of the losses, so that all ranks have made one copy before any begins
  /// the next. After a CommunicationError the previous copy is still whole.
  void copy(const std::vector<StateTensor>& tensors, const TrainingProgress& progress,
            const Config& config);

  /// The copy that copy() makes next.
  CopyId next() const { return {round_, number_}; }

 private:
  struct Plan;

  void make_plan(const std::vector<StateTensor>& tensors, const Config& config);
  void forget_others() const;
  std::string own_content(const std::vector<StateTensor>& tensors) const;
  /// Gives `copy` the memory of the plan.
  void prepare(StateCopy& copy) const;
  void fill(const CopiedPart& own, const std::vector<StateTensor>& tensors) const;

  ParallelState state_;
  StateCopies& into_;
  int64_t replicas_, round_;
  int64_t number_ = 0;
  std::shared_ptr<Plan> plan_;
};

}  // namespace lockstep
