#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Checks, by fingerprints of the bits (kernels::fingerprint), whether ranks with copies of the
/// same values still agree, and whether values without a copy are unchanged. It detects a bit that
/// flipped in memory or in transit, and an update that one rank computed wrongly. Nothing else
/// would: the run would continue with ranks that train different models.
///
///     ReplicaCheck check(trainer_state, parallel_state);
///     ... a step ...
///     check.remember();
///     ... forward and backward of the next step, which write none of these tensors ...
///     check.compare("iteration 12, before its update");
class ReplicaCheck {
 public:
  /// `tensors` are the tensors of this rank; their memory must stay valid. Two ranks hold copies if
  /// both list the same part under the same name and state. Values named in `written` change
  /// between remember() and compare(); only their copies are compared. Collective over the world,
  /// once.
  ReplicaCheck(std::vector<StateTensor> tensors, const ParallelState& state,
               const std::set<std::string>& written = {});

  /// Reads this rank's tensors of which no other rank holds a copy: until the next remember() or
  /// forget(), compare() checks that they still have these bits. Communicates nothing, and does not
  /// wait for a device.
  void remember();
  void forget() { remembered_.clear(); }

  /// Compares all copies, and the values without a copy with what remember() read. If some differ,
  /// all ranks throw CommunicationError. Its message begins with `when` and names the first tensor,
  /// the number of others, and the ranks that differ from the majority or, without a majority,
  /// which ranks hold what; for values without a copy, the ranks on which they have changed.
  /// Collective over the world: an all-reduce with 16 bytes for each part that several ranks of the
  /// world hold and 8 more; if something differs, also an all-gather of a text. Waits for it.
  void compare(const std::string& when);

  /// Number of parts of the whole model that several ranks hold.
  size_t num_shared() const { return shared_.size(); }

 private:
  struct Shared {
    std::vector<int64_t> holders;  ///< ranks, ascending
    int64_t own = -1;              ///< index in tensors_, or -1
  };

  /// `copies`: this rank's fingerprints of shared_. `changed`: indices in tensors_.
  void compare_over_ranks(const std::string& when, const std::vector<int64_t>& copies,
                          const std::vector<size_t>& changed) const;
  [[noreturn]] void fail_for_copies(const std::string& when, const std::vector<size_t>& differing,
                                    int64_t own_of_first) const;
  [[noreturn]] void fail_for_changes(const std::string& when,
                                     const std::vector<size_t>& changed) const;

  std::vector<StateTensor> tensors_;
  ParallelState state_;
  std::vector<Shared> shared_;          ///< in the same order on all ranks
  std::vector<size_t> alone_;           ///< indices in tensors_ of what only this rank holds
  std::vector<at::Tensor> remembered_;  ///< fingerprints of alone_, or empty
};

}  // namespace lockstep
