#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Finds out whether ranks that hold copies of the same values still do, and whether values are
/// still what they were, by fingerprints of their bits (kernels::fingerprint). A bit that flips in
/// memory or on the way, or an update that one rank computes wrong, is found where nothing else
/// would tell: the run would go on with ranks that train different models.
///
///     ReplicaCheck check(trainer_state, parallel_state);
///     ... a step ...
///     check.compare("iteration 12");
class ReplicaCheck {
 public:
  /// `tensors` are what this rank holds; their memory must stay. Two ranks hold copies of what both
  /// list under one name and state, as the same part. Collective over the world, once.
  ReplicaCheck(std::vector<StateTensor> tensors, const ParallelState& state);

  /// Compares all copies. CommunicationError on all ranks where some differ, beginning with `when`:
  /// names the first tensor, how many others there are, and which ranks differ from the majority;
  /// where there is none, which ranks hold what. Collective over the world: an all-reduce of 16
  /// bytes for each part that several ranks of the world hold; waits for it. It also notes what
  /// unchanged() compares with.
  void compare(const std::string& when);

  /// Whether this rank's tensors still have the bits of the last compare(), which also tells of
  /// tensors without a copy. CommunicationError on all ranks, as above, naming the ranks on which
  /// some have changed. Collective over the world: an all-reduce of 8 bytes; where some have
  /// changed, also an all-gather of a text.
  void unchanged(const std::string& when) const;

  /// Parts that several ranks hold, of the whole model.
  size_t num_shared() const { return shared_.size(); }

 private:
  struct Shared {
    std::vector<int64_t> holders;  ///< ranks, ascending
    int64_t own = -1;              ///< index in tensors_, or -1
  };

  std::vector<int64_t> fingerprints() const;
  [[noreturn]] void fail_for(const std::string& when, const std::vector<size_t>& differing,
                             const std::vector<int64_t>& own) const;

  std::vector<StateTensor> tensors_;
  ParallelState state_;
  std::vector<Shared> shared_;  ///< in the same order on all ranks
  std::vector<int64_t> last_;   ///< fingerprints of tensors_ in the last compare()
};

}  // namespace lockstep
