#pragma once

#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/testing/model_check.h"
#include "lockstep/testing/rank_layout.h"

namespace lockstep::testing {

/// How a layout differs from one process.
struct Finding {
  /// "parameters", "forward", "loss", "backward", "finalize", "norm", "update", or "error" for an
  /// exception
  std::string pass = {};
  std::string parameter = {};  ///< by its global name; empty if none can be named
  std::string axis = {};       ///< "tp", "dp-cp", ...; empty if no single one is at fault
  /// The ratio of the found value to the right one, if that is one number.
  std::optional<double> factor = {};
  int64_t step = 0;
  std::string text = {};  ///< what is wrong, and what to do
};

/// One layout compared with one process. The differences are the largest of all ranks and steps,
/// relative to the largest value of the model; NaN where it was not reached.
struct LayoutResult {
  RankLayout layout;
  double loss = std::numeric_limits<double>::quiet_NaN();
  double gradients = std::numeric_limits<double>::quiet_NaN();
  double norm = std::numeric_limits<double>::quiet_NaN();
  double weights = std::numeric_limits<double>::quiet_NaN();
  std::optional<Finding> culprit = {};  ///< the first one; unset: no difference
};

struct LayoutReport {
  std::vector<LayoutResult> layouts;
  bool ok() const;
};

/// "2 ranks, tp 2: `mlp.bias`: the gradient is 2 times what it should be over tp: ..."
std::string to_string(const LayoutResult& result);
/// A line for each layout.
std::string to_string(const LayoutReport& report);

/// Trains a model for some steps on every layout, on ranks as threads, and in one process, in fp64
/// and from the same weights, and compares loss, gradients after finalize_model_grads(), gradient
/// norm and weights. Weights are those that the model starts from in one process; what is constant
/// there (biases, norms) gets other values, so that every error shows. Each rank gets the piece of
/// them that the parameter's description states.
///
/// On the first difference it looks for the cause: at the shapes, at the activations that each
/// parameter meets in forward, at each rank's local gradients before the reduction, and at the
/// parts of the norm. The culprit's text says which parameter, over which axis, by which factor,
/// and what that means. The reference is plain autograd of the module without
/// DistributedDataParallel; its weights are updated by an Optimizer in one process.
///
/// The model is one piece per rank: no virtual pipeline stages. All parameters of a rank get a
/// gradient in every step, unless options.ddp.allow_unused_parameters is set. What a rank throws
/// becomes a Finding of pass "error". ConfigError: as RankLayout::grids(). UsageError: a gradient,
/// or a weight after an update, that is not finite in one process. What the model throws in one
/// process is rethrown.
///
/// A parameter is followed through forward where an operator of libtorch takes it, or a view of it.
/// For that, sharded parameters (optim_grads_params) are gathered before forward, and stay whole
/// until the update; communication_of_step() and check_checkpoint() gather them at their use.
LayoutReport check_layouts(const MakeModule& make_model, const StageLoss& loss,
                           const std::vector<RankLayout>& layouts,
                           const CheckOptions& options = {});

/// The same for functions that know the type of the model:
///
///     const auto report = check_layouts(
///         [](const ParallelContext& context) { return std::make_shared<Net>(context); },
///         [](Net& net, const StageInput& input) { return net.loss(batch(input)); },
///         {{.ranks = 2, .sizes = {.tensor = 2}}, {.ranks = 2}});
///     EXPECT_TRUE(report.ok()) << to_string(report);
template <class Make, class Loss>
LayoutReport check_layouts(Make make_model, Loss loss, const std::vector<RankLayout>& layouts,
                           const CheckOptions& options = {}) {
  const auto [make, stage_loss] = erased(std::move(make_model), std::move(loss));
  return check_layouts(make, stage_loss, layouts, options);
}

}  // namespace lockstep::testing
