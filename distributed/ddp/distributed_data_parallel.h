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
///     optimizer.step();
///
/// Gradients are in `param.grad()`, as in PyTorch. If the loss is a sum over tokens (the default,
/// ddp.calculate_per_token_loss), finalize_model_grads() divides the gradients by the number of
/// tokens in the global batch. If the loss is a mean, set calculate_per_token_loss = false. Then
/// the reduction averages over the ranks, and with several micro-batches the caller divides each
/// loss by their number.
///
/// With ddp.use_distributed_optimizer each rank owns an equal shard of every bucket.
/// Reduce-scatters reduce the gradients into the shard (only there does param.grad() hold reduced
/// values), DistributedOptimizer updates it, and all-gathers give all ranks the new parameters.
/// With several optimizer instances (ParallelSizes::optimizer_instances) the shards are cut inside
/// an instance, and an all-reduce that starts in finish_grad_sync() adds them over the instances.
///
/// With ddp.data_parallel_sharding_strategy = optim_grads the gradients of a bucket have memory
/// from the first gradient of a step to the end of the bucket's reduction. After that, param.grad()
/// is undefined, and only this rank's shard of the buffer remains. With optim_grads_params the
/// parameters of a unit (see number_units(); for a list of parameters, a bucket) have memory from
/// their gather until another unit is used. An operator gathers the parameters that it takes, in
/// forward, in backward and everywhere else, as long as it is called on the thread that called
/// zero_grad_buffer(), or by autograd for that thread. Any other read throws c10::Error, except
/// through a view that was made before, which cannot be intercepted. All ranks must read in the
/// same order, or call unshard() first. In-place changes without autograd persist if all ranks make
/// them. Before a write through data_ptr() or Tensor::data(), call unshard(). With
/// ddp.overlap_param_gather the next unit is gathered while the current one is in use. On an
/// asynchronous device forward and backward must run on one stream.
///
/// With ddp.allow_unused_parameters nothing is reduced before start_grad_sync() or
/// finish_grad_sync(), because ranks that use different parameters would reduce them at different
/// points of backward, before or after what else they communicate over the same ranks. A last
/// backward that reaches none of the parameters on this rank is not noticed: call start_grad_sync()
/// after it.
///
/// Misuse throws UsageError with the names of the parameters. The other ranks are notified and
/// raise CommunicationError instead of waiting. Misuse means: one backward too many, a step that is
/// finished before every parameter has its gradient, or a gradient that was replaced after the last
/// backward, whether before or after it was reduced or made final. Between two micro-batches a
/// gradient belongs to the caller, as in plain autograd: the next backward adds to the current
/// param.grad(). If param.grad() was made undefined, the next gradient starts again from zero; if
/// none follows in the step, the former gradient counts. A backward may give a parameter an
/// undefined gradient, as functions do that do not use it: that counts as zeros.
class DistributedDataParallel {
 public:
  /// Takes over the parameters of `module` that require a gradient. They keep their values and
  /// become contiguous in the default memory format, even if they were channels-last. A parameter
  /// that is registered with the module later is not trained: its gradient stays local to this
  /// rank, and no optimizer of this object updates it. Collective over the data-parallel ranks, and
  /// over tp, etp and ep. First compares `config` and the parameters of all ranks (names, shapes,
  /// dtypes, descriptions, whether they are trained, `matrices`), and names, shapes and dtypes of
  /// registered buffers. If they differ, every rank throws CommunicationError naming the first
  /// difference. The same is compared over tp, etp and ep for parameters whose gradients are
  /// partial there; the pieces of a parameter that is cut over one of these axes may have different
  /// lengths. For other parameters that tp or etp ranks hold under one name, the ranks compare
  /// whether the parameters are trained and, if they are whole, whether they have weight decay; a
  /// rank may hold further parameters. With optim_grads_params, ranks that hold the same experts
  /// must have the same units, because they gather the experts together. Then the ranks of a
  /// data-parallel group get the parameters and registered buffers of its first rank; nothing is
  /// sent over tp (see broadcast_params(), which is not called again: buffers that change in
  /// training, such as running means, differ between ranks).
  ///
  /// UsageError if no parameter is trained and there is one pipeline stage, if a parameter is
  /// already wrapped or was made for other numbers of ranks (NamedParameter::cut_by), for an
  /// undefined tensor, for a tensor or a name that is listed twice, for a trained parameter that is
  /// not a leaf, is sparse or expanded, shares elements with another one or with a registered
  /// buffer, or, in a job of several ranks, is not on the job's device, for a description that
  /// contradicts itself (ParamDescription::validate) or cuts a dimension that the tensor does not
  /// have. If only some ranks find such an error in their arguments, the others throw
  /// CommunicationError.
  ///
  /// `disable_bucketing`: one bucket per buffer whatever `config` says, for model chunks whose
  /// reduction is hidden by that of other chunks. All pipeline stages except the first always do
  /// this. It has no effect on sharded gradients (optim_grads, optim_grads_params).
  ///
  /// `matrices` = whole: for an optimizer that updates matrices as a whole (optimizer.optimizer =
  /// muon; see matrix_layout()). Parameters whose description says ParamUpdate::matrix get separate
  /// buffers, and the distributed optimizer does not cut such matrices; see
  /// compute_whole_param_layout(). If tp or etp cuts them, their pieces must have the same shape on
  /// all ranks of that axis, which is checked. UsageError for a gradient that is declared complete
  /// or a partial mean over data- or context-parallel ranks, because the gradients of all these
  /// ranks are added. ConfigError: fields that cannot be combined.
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
  /// long as they do. Sharded parameters (optim_grads_params), and those that were changed and not
  /// gathered since (note_params_changed()), are lost: reading one throws c10::Error. To keep them,
  /// call unshard() first, on all ranks.
  ~DistributedDataParallel();

  DistributedDataParallel(const DistributedDataParallel&) = delete;
  DistributedDataParallel& operator=(const DistributedDataParallel&) = delete;

  /// While a guard exists, gradients are accumulated and nothing is reduced. Guards can be nested.
  /// Forward may be inside or outside; only backward matters.
  using NoSyncGuard = lockstep::NoSyncGuard;
  [[nodiscard]] NoSyncGuard no_sync();

  /// Alternative to no_sync(): the backwards of each following step are counted, and backward
  /// number `count` reduces. Call it between steps only. Every parameter must get a gradient in
  /// each backward, unless ddp.allow_unused_parameters is set. All ranks must set the same count.
  /// It is not compared: if it differs, some ranks wait for others until the timeout.
  void set_num_microbatches(int64_t count);

  /// Declares that all micro-batches are done, and starts the reduction of every bucket that has
  /// not been started. Not needed after a backward outside no_sync() that reaches a parameter.
  /// Throws if a parameter has received no gradient since zero_grad_buffer(), unless
  /// ddp.allow_unused_parameters is set.
  void start_grad_sync();

  /// Waits until all gradients are reduced, and starts reductions that have not been started.
  /// Throws if a parameter lacks its gradient of the last micro-batch, or if a gradient was
  /// replaced, or if a parameter is frozen now that was trained when it was wrapped, or the other
  /// way round.
  void finish_grad_sync();

  /// Multiplies all gradients; after the reduction with the distributed optimizer, those that this
  /// rank owns. Before the reduction all ranks must call it with the same factor. UsageError while
  /// gradients are being reduced, and with optim_grads or optim_grads_params before they are.
  void scale_gradients(double factor);

  /// With the distributed optimizer: all following steps reduce by all-reduces, and every rank gets
  /// all gradients, to inspect or save them. finalize_model_grads() then processes all of them; the
  /// optimizer still uses only its shard. All ranks and all models that are finalized together must
  /// set the same. Between steps only; gradients that are reduced already stay what they are until
  /// zero_grad_buffer(). false undoes it. UsageError if gradients are sharded.
  void set_force_all_reduce(bool on);

  /// Moves the gradients to the host's memory and frees the device's memory, so that it can be used
  /// for something else between two steps; restore_grad_buffers() brings them back. In between,
  /// reading a gradient throws. UsageError while gradients are being reduced.
  void offload_grad_buffers();
  void restore_grad_buffers();

  /// Sets all gradients to zero and begins a new step. Call it before the step's first backward,
  /// instead of optimizer.zero_grad(). UsageError while gradients are being reduced, and if the
  /// step's last backward has come but the reduction has not (finish_grad_sync() or
  /// finalize_model_grads()). A step without a last backward may be dropped.
  void zero_grad_buffer();
  /// The same, under the name that all fronts share.
  void zero_grad() { zero_grad_buffer(); }

  /// Abandons a step in which something threw, for example an operator in the middle of backward,
  /// and begins the next step. Required if reductions are in progress (state "reducing") or the
  /// last backward has begun, always allowed. All data-parallel ranks must call it in the same
  /// step. They reduce NaN in place of what they have not reduced yet, so a rank that finishes its
  /// step instead gets gradients that every optimizer here refuses, and never a wrong sum. With
  /// optim_grads_params a rank that stopped earlier than others does not gather what they wait for:
  /// then, and if ranks abandon several of these objects in different orders, they wait until the
  /// timeout. CommunicationError if a rank has failed.
  void abandon_step();

  /// Gives all data-parallel ranks the parameters, the frozen parameters and the registered module
  /// buffers of the first rank of their dp-cp group. Experts come from the first rank of expert-dp,
  /// and so do the buffers of a module all of whose parameters are experts. Nothing is sent over
  /// tp, etp and pp, and nothing compares values there: ranks of these axes that hold copies of a
  /// parameter or of a buffer must start from the same values. DescribedModule::add() sees to that;
  /// for a libtorch module set the same seed (torch::manual_seed()) on all ranks. Do not register a
  /// buffer that depends on the rank of dp-cp in any other way, such as the positions of a
  /// context-parallel rank: keep it as a plain member. An Optimizer that was made before has master
  /// weights of bf16 and fp16 parameters: then call its reload_model_params() after it, or the next
  /// step restores the old values.
  void broadcast_params();

  /// With the distributed optimizer: gathers the parameters on all ranks after the optimizer has
  /// changed its shard. DistributedOptimizer::step() calls it. With ddp.overlap_param_gather it
  /// returns while the all-gathers continue, in the order in which parameters were registered.
  ///
  /// A parameter cannot be read until it has arrived. C++ modules have no forward pre-hooks;
  /// instead every operator that is called on this thread waits for the parameters among its
  /// arguments, whatever the module. Code for forward, evaluation and copies needs no change. Any
  /// other read (data_ptr() alone, an operator on another thread) throws c10::Error, so stale
  /// weights are never read.
  ///
  /// `force_sync`: return only when all parameters have arrived. `force_dispatch`: gather even if
  /// the optimizer has changed nothing since the last gather. Does nothing without the distributed
  /// optimizer. With ddp.align_param_gather the pipeline stages first wait for each other, so all
  /// must call it equally often; an Optimizer does so even if a stage has fewer models than others.
  void start_param_sync(bool force_sync = false, bool force_dispatch = false);
  /// Returns when all parameters can be read (on CUDA: by the current stream).
  void finish_param_sync();
  /// Whether some parameters have not arrived yet.
  bool param_sync_pending() const;
  /// If the parameters are sharded (optim_grads_params): gathers all of them, which takes the
  /// memory of a whole model. They can be read and written freely until reshard(),
  /// zero_grad_buffer() or the optimizer's step. All data-parallel ranks must call it. Otherwise it
  /// is the same as finish_param_sync().
  void unshard();
  /// Frees the gathered parameters. Each rank keeps what was written to its shard. Does nothing if
  /// the parameters are not sharded.
  void reshard();
  /// Until enable_forward_pre_hook() is called, start_param_sync() waits, as it does without
  /// ddp.overlap_param_gather. `param_sync`: also calls finish_param_sync().
  void disable_forward_pre_hook(bool param_sync = true);
  /// Undoes disable_forward_pre_hook(). UsageError without ddp.overlap_param_gather.
  void enable_forward_pre_hook();
  /// For your own optimizer, if it does not use update_params(): declares that this rank's shard of
  /// the parameters has changed, so that start_param_sync() gathers.
  void note_params_changed();

  /// Changes the parameters in buffers()[buffer]->owned()[range].
  using RangeUpdate = std::function<void(size_t buffer, size_t range)>;
  /// For an optimizer that updates range by range: calls `update` for every range that this rank
  /// owns, in the order in which forward needs them. With the distributed optimizer it first waits
  /// for gathers in progress, and it includes note_params_changed() and start_param_sync(). With
  /// ddp.overlap_param_gather the gather of a bucket starts when `update` returns for it, and
  /// overlaps the updates of the following buckets. What is gathered, and in which order, does not
  /// change. All data-parallel ranks must call it.
  void update_params(const RangeUpdate& update);

  /// Whether this rank owns a shard only (ddp.use_distributed_optimizer).
  bool is_sharded() const;

  /// How the reduction normalizes, from the configuration.
  GradientScalingMode scaling_mode() const;
  /// "idle", "accumulating 1", "reducing", "ready"
  std::string state_text() const;
  const ParallelState& parallel_state() const;

  /// The buffers: one for each (parameter dtype, gradient dtype, dense or expert). Some parameters
  /// have separate buffers: whole matrices, and parameters whose gradients are partial over pp, or
  /// over an axis whose ranks lay out their buffers differently.
  const std::vector<const ParamAndGradBuffer*>& buffers() const;

  /// The buckets, in the order in which they are launched.
  std::vector<BucketInfo> buckets() const;

  /// A table of the buckets, for logs.
  std::string describe() const;

 private:
  friend struct detail::StepAccess;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
