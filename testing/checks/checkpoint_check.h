#pragma once

#include <string>
#include <vector>

#include "lockstep/testing/model_check.h"
#include "lockstep/testing/rank_layout.h"

namespace lockstep::testing {

/// A tensor that is not what was saved, is missing, or is not the same on all ranks that hold it.
struct ChangedTensor {
  std::string name;   ///< of the parameter or registered buffer
  std::string state;  ///< empty for its value, otherwise a part of the optimizer's state
  std::string what;   ///< "12 of 64 elements differ, the first at 3: 0.5 was saved, 0 is there"
};

struct CheckpointReport {
  RankLayout saved_on, loaded_on;
  std::vector<ChangedTensor> changed = {};
  std::string error = {};  ///< what saving or loading threw; empty: nothing
  double next_loss = 0;    ///< of the next step, where training went on
  double loaded_loss = 0;  ///< of the same step after loading
  double tolerance = 0;    ///< CheckOptions::tolerance, of losses; relative above 1
  bool ok() const;
};

/// "saved on 4 ranks, tp 2, loaded on 1 rank: `table.weight`: 3 of 64 elements differ, ...".
std::string to_string(const CheckpointReport& report);

/// Trains the model for options.steps steps on `saved_on`, saves a checkpoint into a temporary
/// folder, and trains one more step. Then loads the checkpoint on `loaded_on` into a model with
/// other initial weights and makes the same step there. Compares each tensor, weights and optimizer
/// state, bit for bit, and the loss of the step to options.tolerance. With the same layout twice it
/// is a round trip, with two layouts a reshard. Also reports elements of which ranks hold different
/// values: a checkpoint keeps one of them.
///
/// options.optimizer is plain_sgd() by default, which keeps no state: choose the one that you train
/// with. What is not a parameter, a registered buffer or part of the optimizer is not saved; a
/// model that keeps such numbers is revealed by its next loss.
///
/// ConfigError: as RankLayout::grids().
CheckpointReport check_checkpoint(const MakeModule& make_model, const StageLoss& loss,
                                  const RankLayout& saved_on, const RankLayout& loaded_on,
                                  const CheckOptions& options = {});

template <class Make, class Loss>
CheckpointReport check_checkpoint(Make make_model, Loss loss, const RankLayout& saved_on,
                                  const RankLayout& loaded_on, const CheckOptions& options = {}) {
  const auto [make, stage_loss] = erased(std::move(make_model), std::move(loss));
  return check_checkpoint(make, stage_loss, saved_on, loaded_on, options);
}

/// check_checkpoint() on one layout.
template <class Make, class Loss>
CheckpointReport check_checkpoint_round_trip(Make make_model, Loss loss, const RankLayout& layout,
                                             const CheckOptions& options = {}) {
  return check_checkpoint(std::move(make_model), std::move(loss), layout, layout, options);
}

}  // namespace lockstep::testing
