#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Checks, by fingerprints of the bits (kernels::fingerprint), whether ranks with copies of the
/// same values still agree, and whether values are unchanged. It detects a bit that flipped in
/// memory or in transit, and an update that one rank computed wrongly. Nothing else would: the run
/// would continue with ranks that train different models.
///
///     ReplicaCheck check(trainer_state, parallel_state);
///     ... a step ...
///     check.compare("iteration 12");
class ReplicaCheck {
 public:
  /// `tensors` are the tensors of this rank; their memory must stay valid. Two ranks hold copies if
  /// both list the same part under the same name and state. Collective over the world, once.
  ReplicaCheck(std::vector<StateTensor> tensors, const ParallelState& state);

  /// Compares all copies. If some differ, all ranks throw CommunicationError. Its message begins
  /// with `when` and names the first tensor, the number of others, and the ranks that differ from
  /// the majority or, without a majority, which ranks hold what. Collective over the world: an
  /// all-reduce with 16 bytes for each part that several ranks of the world hold; waits for it. It
  /// also records the fingerprints that unchanged() compares with.
  void compare(const std::string& when);

  /// Checks that this rank's tensors still have the bits of the last compare(), including tensors
  /// without a copy. If some have changed, all ranks throw CommunicationError, as above, naming the
  /// ranks on which they have. Collective over the world: an all-reduce of 8 bytes; if some have
  /// changed, also an all-gather of a text.
  void unchanged(const std::string& when) const;

  /// Number of parts of the whole model that several ranks hold.
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
