#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/core/config.h"
#include "lockstep/core/parameters.h"
#include "lockstep/distributed/bucket_info.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/no_sync.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/parallel_state.h"

namespace lockstep {

namespace detail {
struct StepAccess;
}

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
/// With ddp.use_distributed_optimizer each rank owns an equal shard of every bucket:
/// reduce-scatters reduce the gradients into it (param.grad() holds reduced values there alone),
/// DistributedOptimizer updates it, and all-gathers give all ranks the new parameters. With several
/// optimizer instances (ParallelSizes::optimizer_instances) the shards are cut inside an instance
/// and an all-reduce adds them over the instances, begun in finish_grad_sync().
///
/// With ddp.data_parallel_sharding_strategy = optim_grads the gradients of a bucket have memory
/// from the first of them in a step to the end of its reduction; then param.grad() is undefined,
/// and this rank's shard of the buffer is what remains. With optim_grads_params the parameters of a
/// unit (see number_units(); of a list of parameters, a bucket) have memory from their gather until
/// another unit is used: an operator gathers what it takes, in forward, backward and everywhere
/// else, as long as it is called on the thread of zero_grad_buffer(), or by autograd for it. Any
/// other read throws c10::Error, but for one through a view that was made before, which nothing can
/// stop. All ranks must read in the same order, or call unshard() first. What is changed in place,
/// without autograd, on all ranks stays; what is written through data_ptr() or Tensor::data() needs
/// unshard() before. With ddp.overlap_param_gather the next unit is gathered while one is used. On
/// an asynchronous device forward and backward must run on one stream.
///
/// Where several of these reduce over the same ranks, as the chunks of a pipeline stage do, and
/// ddp.allow_unused_parameters is set, nothing is reduced before start_grad_sync() or
/// finish_grad_sync(): ranks that use other parameters would reduce the chunks in another order.
///
/// Misuse throws UsageError with the names of the parameters, and the other ranks are told, so that
/// they raise CommunicationError instead of waiting: a second backward too many, a step that is
/// finished before every parameter has its gradient, a gradient that somebody replaced after the
/// last backward. Between two micro-batches a gradient is the caller's, as in plain autograd: the
/// next backward adds to what param.grad() is then, and from undefined it begins anew, so that what
/// was accumulated before is gone.
class DistributedDataParallel {
 public:
  /// Takes over the parameters of `module` that require a gradient; they keep their values and
  /// become contiguous in the default memory format, channels-last ones too. A parameter that is
  /// registered with the module later is not trained: its gradient stays this rank's own, and no
  /// optimizer of this object updates it. Collective over the data-parallel ranks, and over tp, etp
  /// and ep. First compares `config` and the parameters of all ranks (names, shapes, dtypes,
  /// descriptions, whether they are trained, `matrices`): where they differ, every rank
  /// throws CommunicationError naming the first difference. The same over tp, etp and ep for
  /// parameters whose gradients are partial there; over any of these the pieces of a parameter that
  /// is cut may have different lengths. Of other parameters that tp or etp ranks hold under one
  /// name they compare whether they are trained, and of whole ones, with weight decay; a rank may
  /// hold others besides. Then gives all ranks the parameters and registered buffers of the first
  /// one (see broadcast_params, which nobody calls later: ranks whose buffers change in training,
  /// as running means do, have their own).
  ///
  /// UsageError if nothing is to be trained, if a parameter is wrapped already, for an undefined
  /// tensor, for a tensor or a name that is listed twice, for a parameter to be trained that is no
  /// leaf, sparse, expanded, or shares elements with another one, for a description that
  /// contradicts itself (ParamDescription::validate) or cuts a dimension that the tensor has not;
  /// if some ranks find that of their own arguments, the others throw CommunicationError.
  ///
  /// `disable_bucketing`: one bucket for each buffer whatever `config` says, for model chunks whose
  /// reduction is hidden by those of other chunks; on all pipeline stages but the first it is
  /// always so.
  ///
  /// `matrices` = whole: for an optimizer that updates matrices as a whole (optimizer.optimizer =
  /// muon; see matrix_layout()). Those whose description says ParamUpdate::matrix get buffers of
  /// their own, and with the distributed optimizer no such matrix is cut; see
  /// compute_whole_param_layout(). Those that tp or etp cuts are compared over it: their pieces
  /// must have one shape. UsageError for a gradient that is declared complete or a partial mean
  /// over data- or context-parallel ranks: the gradients of all of them are added. ConfigError:
  /// fields that do not go together.
  DistributedDataParallel(const torch::nn::Module& module, const ParallelState& parallel_state,
                          const DistributedDataParallelConfig& config = {},
                          bool disable_bucketing = false,
                          MatrixLayout matrices = MatrixLayout::cut);

  /// The same for a list of parameters, with their descriptions.
  DistributedDataParallel(const std::vector<NamedParameter>& parameters,
                          const ParallelState& parallel_state,
                          const DistributedDataParallelConfig& config = {},
                          bool disable_bucketing = false,
                          MatrixLayout matrices = MatrixLayout::cut);

  /// Removes the hooks. Parameters and gradients stay views of the buffers' memory, which lives as
  /// long as they do.
  ~DistributedDataParallel();

  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// While a guard lives, gradients are accumulated and nothing is reduced. Guards nest. Forward
  /// may be inside or outside; backward is what counts.
  using NoSyncGuard = lockstep::NoSyncGuard;
  [[nodiscard]] NoSyncGuard no_sync();

  /// Instead of no_sync(): the backwards of each following step are counted, and number `count`
  /// reduces. Between steps only. Every parameter must get a gradient in each of them, unless
  /// ddp.allow_unused_parameters is set. All ranks set the same count: nothing compares it, and
  /// where it differs some wait for others until the timeout.
  void set_num_microbatches(int64_t count);

  /// States that all micro-batches are done and starts the reduction of every bucket that is not
  /// under way. Not needed after a backward outside no_sync(). Throws if a parameter has received
  /// no gradient since zero_grad_buffer().
  void start_grad_sync();

  /// Waits until all gradients are reduced; starts what has not been started. Throws if a parameter
  /// lacks its gradient of the last micro-batch, or if somebody replaced a gradient.
  void finish_grad_sync();

  /// Multiplies all gradients; with the distributed optimizer those that this rank owns.
  void scale_gradients(double factor);

  /// With the distributed optimizer: the steps from now on reduce by all-reduces, and every rank
  /// gets all gradients, to look at or to save. finalize_model_grads treats all of them then; the
  /// optimizer goes on to use its shard. Between steps only; false undoes it. UsageError where
  /// gradients are sharded.
  void set_force_all_reduce(bool on);

  /// Moves the gradients to the host's memory and frees the device's, for somebody else who needs
  /// it between two steps; restore_grad_buffers() brings them back. In between a gradient that is
  /// read throws. UsageError while gradients are being reduced.
  void offload_grad_buffers();
  void restore_grad_buffers();

  /// Sets all gradients to zero and begins a new step. Call it before the step's first backward. It
  /// replaces optimizer.zero_grad().
  void zero_grad_buffer();
  /// The same, under the name that all fronts have.
  void zero_grad() { zero_grad_buffer(); }

  /// Gives up a step in which something threw, an operator in the middle of backward for instance,
  /// and begins the next one. Needed where reductions are under way (state "reducing"), allowed
  /// always; all data-parallel ranks must call it in the same step. They reduce NaN in place of
  /// what they have not reduced yet: a rank that finishes its step instead gets gradients that
  /// every optimizer here refuses, not a wrong sum. CommunicationError if a rank has failed.
  void abandon_step();

  /// Gives all data-parallel ranks the parameters, the frozen parameters and the registered module
  /// buffers of the first rank.
  void broadcast_params();

  /// With the distributed optimizer: gathers the parameters after the optimizer changed its shard,
  /// on all ranks. DistributedOptimizer::step() calls it. With ddp.overlap_param_gather it returns
  /// while the all-gathers go on, in the order of the parameters' registration.
  ///
  /// Until a parameter has arrived it cannot be read. C++ modules have no forward pre-hooks;
  /// instead every operator called on this thread waits for the parameters among its arguments,
  /// whatever the module: forward, evaluation and copies need not know. Any other read (data_ptr()
  /// alone, an operator on another thread) throws c10::Error, so that nobody sees stale weights.
  ///
  /// `force_sync`: returns when all parameters are there. `force_dispatch`: gathers even if the
  /// optimizer has changed nothing since the last time. Does nothing without the distributed
  /// optimizer. With ddp.align_param_gather the pipeline stages wait for each other first.
  void start_param_sync(bool force_sync = false, bool force_dispatch = false);
  /// Returns when all parameters can be read (on CUDA: by the current stream).
  void finish_param_sync();
  /// Whether some parameters have not arrived yet.
  bool param_sync_pending() const;
  /// Where the parameters are sharded (optim_grads_params): gathers all of them, which takes the
  /// memory of a whole model. They stay, to be read or written by whoever likes, until reshard(),
  /// zero_grad_buffer() or the optimizer's step. All data-parallel ranks must call it. Elsewhere it
  /// is finish_param_sync().
  void unshard();
  /// Frees them; what was written stays, of each rank in its shard. Does nothing elsewhere.
  void reshard();
  /// Until enable_forward_pre_hook() start_param_sync() waits, as without ddp.overlap_param_gather.
  /// `param_sync`: finish_param_sync() as well.
  void disable_forward_pre_hook(bool param_sync = true);
  /// Undoes disable_forward_pre_hook(). UsageError without ddp.overlap_param_gather.
  void enable_forward_pre_hook();
  /// For an optimizer of one's own that does not go through update_params(): it changed this rank's
  /// shard of the parameters, so that start_param_sync() gathers.
  void note_params_changed();

  /// Changes the parameters in buffers()[buffer]->owned()[range].
  using RangeUpdate = std::function<void(size_t buffer, size_t range)>;
  /// For an optimizer that updates range by range: calls `update` for every range that this rank
  /// owns, first for what forward needs first. With the distributed optimizer it waits for gathers
  /// that are under way before, and is note_params_changed() and start_param_sync() as well: with
  /// ddp.overlap_param_gather the gather of a bucket starts when `update` returns from it, and goes
  /// on beside the updates of the buckets that follow. What is gathered, and in which order, is the
  /// same. All data-parallel ranks must call it.
  void update_params(const RangeUpdate& update);

  /// Whether this rank owns a shard only (ddp.use_distributed_optimizer).
  bool is_sharded() const;

  /// How the reduction normalizes, from the configuration.
  GradientScalingMode scaling_mode() const;
  /// "idle", "accumulating 1", "reducing", "ready"
  std::string state_text() const;
  const ParallelState& parallel_state() const;

  /// The buffers: one for each (parameter dtype, gradient dtype, dense or expert), and more for
  /// parameters that must lie apart: whole matrices, and those whose gradients are partial over pp,
  /// or over an axis whose ranks lay out their buffers differently.
  const std::vector<const ParamAndGradBuffer*>& buffers() const;

  /// In the order in which buckets are launched.
  std::vector<BucketInfo> buckets() const;

  /// A table of the buckets, for logs.
  std::string describe() const;

 private:
  friend struct detail::StepAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
