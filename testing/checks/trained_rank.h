#pragma once

// Internal: one rank that trains the model of a check as a user's loop would.

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/testing/model_check.h"
#include "lockstep/testing/rank_layout.h"

namespace lockstep::testing {

/// Values of whole parameters by their names.
using WholeWeights = std::map<std::string, at::Tensor>;

/// The label of the reductions that give all ranks the loss; no model has it.
inline constexpr const char* kLossOfStep = "loss of the step that is checked";

/// The weights that the model starts from in one process.
WholeWeights weights_in_one_process(const MakeModule& make, uint64_t seed);

class TrainedRank {
 public:
  /// Starts from this rank's pieces of `weights`, so that random numbers that a module draws when
  /// it is made do not make ranks differ.
  TrainedRank(const MakeModule& make, const StageLoss& loss, const RankLayout& layout,
              const CheckOptions& options, const ParallelState& state, const WholeWeights& weights);

  /// One step; returns the loss of the global batch, the same on all ranks.
  double step(int64_t number);

  /// Weights and optimizer state, with views of their memory. Sharded parameters are gathered, and
  /// stay so until the next step; collective.
  std::vector<StateTensor> state_tensors();
  torch::nn::Module& module() { return *module_; }
  Optimizer& optimizer() { return *optimizer_; }

 private:
  const StageLoss& loss_;
  const CheckOptions& options_;
  const ParallelState& state_;
  ParallelContext context_;
  std::shared_ptr<torch::nn::Module> module_;
  std::optional<DistributedDataParallel> ddp_;
  std::optional<Optimizer> optimizer_;
};

}  // namespace lockstep::testing
