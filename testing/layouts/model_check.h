#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/parallel_context.h"
#include "lockstep/optimizer/param_groups.h"
#include "lockstep/optimizer/update_rule.h"

/// What the checks of this library run: your model, its loss, and how they are trained.
namespace lockstep::testing {

/// What a rank needs for the forward of one micro-batch.
struct StageInput {
  const ParallelContext& context;  ///< that the module was made with
  int64_t step = 0;                ///< from 0
  int64_t microbatch = 0;          ///< from 0; the same global micro-batch on every layout
  at::Tensor hidden = {};          ///< of the previous pipeline stage; undefined on the first one
};

/// Makes this rank's part of the model: of the pipeline stage, and of the matrices that tp cuts.
/// In one process it makes the whole. `context` has fp64 on the CPU.
using MakeModule = std::function<std::shared_ptr<torch::nn::Module>(const ParallelContext&)>;

/// The forward of this rank's part of a micro-batch: what the next pipeline stage takes, or on the
/// last one the loss, one element. Data- and context-parallel ranks take their samples or tokens
/// from the micro-batch; in one process it is the whole. The loss is a sum over the rank's tokens;
/// with ddp.calculate_per_token_loss = false a mean over them, divided by the micro-batches.
using StageLoss = std::function<at::Tensor(torch::nn::Module&, const StageInput&)>;

/// Replaces finalize_model_grads(). It must pass `num_tokens` on, which is unset without per-token
/// scaling.
using FinalizeStep = std::function<void(torch::nn::Module&, DistributedDataParallel&,
                                        const std::optional<at::Tensor>& num_tokens)>;

/// SGD without momentum and clipping, which does not amplify rounding errors of the gradients. Its
/// learning rate, 0.001, suits losses that are sums over tokens: large steps lead to weights where
/// rounding errors of forward grow.
OptimizerConfig plain_sgd();

struct CheckOptions {
  int64_t steps = 2;  ///< of training; one step already shows errors of the first gradients
  int64_t microbatches = 2;
  /// The tolerance of losses and gradients, relative to the largest of the model's; weights get 100
  /// times that.
  double tolerance = 1e-12;
  /// Of ParallelContext and, while the model is made in one process, of libtorch's default CPU
  /// generator, from which torch::nn modules take their weights: a check starts from the same
  /// weights each time it runs.
  uint64_t seed = 1234;
  DistributedDataParallelConfig ddp = {};
  OptimizerConfig optimizer = plain_sgd();
  std::vector<ParamOverride> overrides = {};
  std::shared_ptr<const UpdateRule> rule = nullptr;  ///< in place of optimizer.optimizer
  FinalizeStep finalize = {};                        ///< empty: finalize_model_grads()
  std::chrono::milliseconds timeout = std::chrono::seconds(20);  ///< of a communication

  /// How the optimizer or the rule needs the matrices to lie, for DistributedDataParallel.
  MatrixLayout matrices() const {
    return matrix_layout(optimizer, rule ? &rule->statement() : nullptr);
  }
};

/// A module of type Model and a function for it, as the checks take them.
template <class Make, class Loss>
std::pair<MakeModule, StageLoss> erased(Make make, Loss loss) {
  using Pointer = std::invoke_result_t<Make, const ParallelContext&>;
  using Model = typename Pointer::element_type;
  return {[make](const ParallelContext& context) -> std::shared_ptr<torch::nn::Module> {
            return make(context);
          },
          [loss](torch::nn::Module& module, const StageInput& input) -> at::Tensor {
            return loss(dynamic_cast<Model&>(module), input);
          }};
}

}  // namespace lockstep::testing
