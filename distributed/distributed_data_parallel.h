#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

/// Data parallelism for any torch::nn::Module: owns contiguous parameter and gradient buffers, and
/// reduces the gradients over the data-parallel ranks, bucket by bucket, while backward still runs.
/// The module is used as before; its parameters have become views of the buffers.
///
/// One training step:
///
///     ddp.zero_grad_buffer();
///     for (micro-batch, all but the last) {
///       const auto guard = ddp.no_sync();
///       loss.backward();
///     }
///     loss.backward();                        // the last one: buckets are reduced as they fill
///     finalize_model_grads({&ddp}, num_tokens);
///     optimizer.step(...);
///
/// Gradients are `param.grad()`, as in PyTorch. With a loss that is summed over tokens (the
/// default, ddp.calculate_per_token_loss) finalize_model_grads divides by the tokens of the global
/// batch. With a loss that is a mean, set calculate_per_token_loss = false: then the reduction
/// averages over the ranks, and with several micro-batches the caller divides each loss by their
/// number.
///
/// Misuse throws UsageError with the names of the parameters, and the other ranks are told, so that
/// they raise CommunicationError instead of waiting: a second backward too many, a step that is
/// finished before every parameter has its gradient, a gradient that somebody replaced.
class DistributedDataParallel {
 public:
  /// Takes over the parameters of `module` that require a gradient. Collective over the
  /// data-parallel ranks. First compares the parameters of all ranks (names, shapes, dtypes,
  /// descriptions, whether they are trained): where they differ, every rank throws
  /// CommunicationError naming the first difference. Then gives all ranks the parameters and
  /// registered buffers of the first one (see broadcast_params). UsageError if nothing is to be
  /// trained, or if a parameter is wrapped already.
  DistributedDataParallel(const torch::nn::Module& module, const ParallelState& parallel_state,
                          const DistributedDataParallelConfig& config = {});

  /// The same for a list of parameters, with their descriptions.
  DistributedDataParallel(std::vector<NamedParameter> parameters,
                          const ParallelState& parallel_state,
                          const DistributedDataParallelConfig& config = {});

  /// Removes the hooks. Parameters and gradients stay views of the buffers' memory, which lives as
  /// long as they do.
  ~DistributedDataParallel();

  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// While a guard lives, gradients are accumulated and nothing is reduced. Guards nest. Forward
  /// may be inside or outside; backward is what counts.
  class [[nodiscard]] NoSyncGuard {
   public:
    ~NoSyncGuard();
    NoSyncGuard(NoSyncGuard&&) noexcept = default;
    NoSyncGuard& operator=(NoSyncGuard&&) = delete;

   private:
    friend class DistributedDataParallel;
    explicit NoSyncGuard(std::shared_ptr<int> depth);
    std::shared_ptr<int> depth_;
  };
  NoSyncGuard no_sync();

  /// Instead of no_sync(): the backwards of each following step are counted, and number `count`
  /// reduces. Between steps only.
  void set_num_microbatches(int64_t count);

  /// States that all micro-batches are done and starts the reduction of every bucket that is not
  /// under way. Not needed after a backward outside no_sync(). Throws if a parameter has received
  /// no gradient since zero_grad_buffer().
  void start_grad_sync();

  /// Waits until all gradients are reduced; starts what has not been started. Throws if a parameter
  /// lacks its gradient of the last micro-batch, or if somebody replaced a gradient.
  void finish_grad_sync();

  /// Multiplies all gradients.
  void scale_gradients(double factor);

  /// Sets all gradients to zero and begins a new step. Call it before the step's first backward. It
  /// replaces optimizer.zero_grad().
  void zero_grad_buffer();

  /// Gives all data-parallel ranks the parameters, the frozen parameters and the registered module
  /// buffers of the first rank.
  void broadcast_params();

  /// How the reduction normalizes, from the configuration.
  GradientScalingMode scaling_mode() const;
  /// "idle", "accumulating 1", "reducing", "ready"
  std::string state_text() const;
  const ParallelState& parallel_state() const;

  /// The buffers: one for each (parameter dtype, gradient dtype, dense or expert).
  const std::vector<std::unique_ptr<ParamAndGradBuffer>>& buffers() const;

  /// One bucket, in the order in which buckets are launched.
  struct BucketInfo {
    std::string label;  ///< "bucket 2 ('layers.0.weight' to 'layers.1.bias')"
    std::string group;  ///< "dp-cp [0, 1]"
    std::string operation;
    at::ScalarType dtype;  ///< of the gradients
    int64_t numel;
    int64_t bytes;
    std::vector<std::string> parameters;  ///< in buffer order
  };
  std::vector<BucketInfo> buckets() const;

  /// A table of the buckets, for logs.
  std::string describe() const;

  /// For finalize_model_grads: finish_grad_sync() unless the step is reduced already. UsageError if
  /// the step was finalized already.
  void begin_finalize();
  void end_finalize();

  /// Throws UsageError naming `caller` unless the gradients are final: reduced, and with per-token
  /// scaling divided by the tokens.
  void require_final_gradients(const char* caller) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
