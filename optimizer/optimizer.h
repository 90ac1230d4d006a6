#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/optimizer/loss_scaler.h"
#include "lockstep/optimizer/param_groups.h"
#include "lockstep/optimizer/update_rule.h"

namespace lockstep {

class OptimizerParamScheduler;
class CountedRanges;
class OptimizerState;

/// One range of one parameter, and what the optimizer knows about it.
struct StateSlice {
  /// A flat tensor of range.numel() elements, a view of the optimizer's memory.
  struct Values {
    std::string name;  ///< "master", or as the update rule names it: "exp_avg", "momentum_buffer"
    at::Tensor tensor;
  };
  std::string parameter;         ///< as in NamedParameter
  ParamDescription description;  ///< of the parameter
  std::vector<int64_t> shape;    ///< of the parameter on this rank
  ElementRange range;            ///< elements of the flattened parameter on this rank
  std::vector<Values> values;    ///< "master" only where the parameter is bf16 or fp16
};

/// What changes from step to step besides the tensors. The same on all ranks. It does not include
/// learning rates and weight decay that were set by hand: set them again, or apply the schedule.
struct OptimizerProgress {
  int64_t num_steps = 0;
  std::optional<GradScalerState> scaler = {};  ///< unset: restore() keeps the loss scale
  bool operator==(const OptimizerProgress&) const = default;
};

/// Updates parameters on the flat buffers of DistributedDataParallel: one pass over contiguous
/// memory, unscaling and clipping included.
///
/// Without ddp.use_distributed_optimizer every rank holds the whole state and makes the same step.
/// With it the state is sharded over the data-parallel ranks (ZeRO-1): this rank holds master
/// weights and state of its shard only, updates that shard of the parameters in their buffer, and
/// gets the other shards by all-gathers; see DistributedDataParallel::update_params(). On the CPU a
/// skipped step gathers nothing; on CUDA it gathers the unchanged parameters. Bytes per parameter
/// element on each of d ranks, with adam and without padding, as parameters + gradients + state:
/// bf16 with fp32 gradients 2 + 4 + 12/d; fp32 4 + 4 + 8/d; fp64 8 + 8 + 16/d. Both variants give
/// the same bits for the same reduced gradients, except for the gradient norm, whose terms are
/// added in another order.
///
/// The update rule is your own UpdateRule, or the one that optimizer.optimizer selects: adam
/// (AdamW), sgd (as torch.optim.SGD: the weight decay is added to the gradient), or muon, for the
/// matrices of buffers with holds_whole_matrices(), while all other parameters use adam:
///
///   m  = lerp(m, g, 1 - muon_momentum),  u = m, or lerp(g, m, muon_momentum) with Nesterov
///   p  = (1 - lr * weight_decay) * p - lr * muon_direction(u)
///
/// A matrix that is cut over tensor-parallel ranks is gathered for the update (one all-gather over
/// tp), so the update does not depend on the layout. The last dimension of a parameter is the
/// columns; all other dimensions together are the rows. One parameter holds the queries, keys and
/// values of an attention layer; with muon_split_qkv each of the three is a separate matrix (see
/// ParamDescription::rows_of_matrices). Other matrices in one parameter count as one matrix.
///
/// fp32 and fp64 parameters are updated in place. bf16 and fp16 parameters have fp32 master
/// weights, from which they are rounded.
///
/// With optimizer.offload and models on a device, the state is in the host's memory, and the host
/// computes the update, by the same rules; adam and sgd are written to have the same bits there,
/// which has not been checked on a GPU. The device holds none of it. In each step the gradients
/// that this rank needs are copied to the host, together with the parameters if there are no master
/// weights or the update rule is your own, and the new parameters are copied back. The host needs
/// page-locked memory for a gradient and a parameter of each element; CUDA's allocator rounds the
/// memory of each buffer up to a power of two.
///
/// Learning rate and weight decay are those of the parameter's group (see group_params()): from the
/// configuration, or from overrides. Groups change neither communication nor checkpoints.
///
/// The state can be saved and loaded through state_slices() and progress(), by any code that can
/// copy flat tensors:
///
///     for (StateSlice& slice : optimizer.state_slices())
///       for (auto& [name, tensor] : slice.values)
///         tensor.copy_(saved_elements(name, slice.range));
///     optimizer.restore(saved_progress);
///     optimizer.apply_master_weights();  // or reload_model_params(), if only weights were loaded
class Optimizer {
 public:
  /// The result of step().
  struct StepResult {
    double grad_norm = 0;  ///< of the whole model, without the loss scale, before clipping
    bool skipped = false;  ///< the step changed nothing because of the norm; see skips_step()
    std::optional<int64_t> num_zeros = {};  ///< with optimizer.log_num_zeros_in_grad: count_zeros()
  };

  /// Further reasons to skip a step, the same on all ranks.
  struct StepLimits {
    /// Skips the step if the gradient norm of the whole model is larger.
    double grad_norm = std::numeric_limits<double>::infinity();
    at::Tensor skip = {};  ///< bool [] on the models' device; true skips; may be undefined
    bool are_set() const { return skip.defined() || std::isfinite(grad_norm); }
  };

  /// The models must outlive the optimizer. `rule`, unless null, replaces optimizer.optimizer.
  /// Collective over dp-cp, tp and pp: the ranks compare `config`, the numbers of `overrides` and
  /// the statement of `rule` (CommunicationError, naming the field and two ranks), their tied
  /// parameters and those whose gradients are partial over pp, and agree on the loss scale. With
  /// optimizer.log_num_zeros_in_grad they also exchange what count_zeros() needs.
  ///
  /// UsageError: no model; some models with and some without ddp.use_distributed_optimizer.
  /// ConfigError: a number out of its bounds; parameters of a dtype other than fp32, fp64, bf16 and
  /// fp16; a rule that keeps bf16 state for fp64 parameters; optimizer.offload with a rule for
  /// matrices (such as muon) and models on a device; a rule for matrices if no parameter is a whole
  /// matrix on any rank (see MatrixLayout::whole of DistributedDataParallel); copies of a tied
  /// parameter in groups with different settings; and the errors of group_params(). Other ranks are
  /// not asked whether an override applies to their parameters, so an override that applies to none
  /// is an error only without pipeline and expert parallelism. If only some ranks find such an
  /// error, the others throw CommunicationError. CommunicationError: a stage lacks its copy of a
  /// tied parameter.
  Optimizer(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config,
            const std::vector<ParamOverride>& overrides = {},
            std::shared_ptr<const UpdateRule> rule = nullptr);

  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step with the final gradients: norm, clipping, update. Gradients are not changed. Call it
  /// on all ranks. On CUDA the decision to skip is made on the device, so the host does not wait
  /// for the norm before it has launched the update (and the gather of parameters). UsageError if
  /// finalize_model_grads() has not been called.
  StepResult step();

  /// step() in two halves, for a loop that reads its own numbers from the device together with the
  /// optimizer's. start_step() launches the update and returns the numbers from which finish_step()
  /// computes the result: fp64 [kStepNumbers] on the device of the models. finish_step() takes
  /// these values on the host. Call it before anything else is done with the optimizer. With
  /// offloaded state finish_step() makes the update, so call it also before anything else is done
  /// with the models. On the CPU nothing is launched for a skipped step. `limits` can skip a step
  /// too; pass `beyond_limits` = true to finish_step() if they did. UsageError: limits after
  /// keep_numbers_on_device().
  static constexpr int64_t kStepNumbers = 2;
  at::Tensor start_step() { return start_step(StepLimits{}); }
  at::Tensor start_step(const StepLimits& limits);
  StepResult finish_step(const double* numbers, bool beyond_limits = false);
  /// Whether the step of these `numbers`, which start_step(limits) returned, changes the
  /// parameters: bool [] on the device, so that the host does not wait.
  at::Tensor applies(const at::Tensor& numbers, const StepLimits& limits) const;

  /// For a step that is recorded once and launched many times, as a CUDA graph: from now on the
  /// updates read learning rates, weight decay and bias corrections from the device's memory.
  /// upload_numbers() fills that memory for the next step: call it before each start_step() and
  /// before each launch of a recorded step. finish_step() follows each, as usual. A second
  /// call does nothing: the memory stays where a recorded step reads it. UsageError, without a
  /// change: an update rule without step_numbers(), such as muon; an offloaded state; and from
  /// upload_numbers() without this call.
  void keep_numbers_on_device();
  void upload_numbers();

  /// Multiply the loss of the next step by this before backward; step() removes it from the
  /// gradients. It is 1 unless optimizer.loss_scale is set or a parameter of any rank is fp16; see
  /// GradScaler. The same on all ranks.
  double loss_scale() const { return scaler_->scale(); }

  /// The groups of this rank's parameters; the first one has the configuration's numbers.
  const std::vector<ParamGroup>& param_groups() const { return groups_; }
  /// The index in param_groups() of each parameter, in the order of the models, of their buffers
  /// and of the parameters in a buffer.
  const std::vector<size_t>& group_of_params() const { return group_of_; }

  /// Sets learning rates and weight decay for an iteration that starts when `samples` samples have
  /// been consumed; each group follows its own max_lr and min_lr.
  void apply_schedule(const OptimizerParamScheduler& scheduler, int64_t samples);

  /// Sets the learning rate of all groups with the configuration's max_lr and min_lr. UsageError,
  /// here and in the next two functions: a number that is not finite or is below 0.
  void set_learning_rate(double value);
  /// Sets the learning rate of param_groups()[group]. UsageError: there is no such group.
  void set_learning_rate(size_t group, double value);
  /// Sets the weight decay of all groups: each group gets `value` times its wd_mult.
  void set_weight_decay(double value);
  /// The learning rate of the first group.
  double learning_rate() const { return groups_.front().lr; }
  /// The weight decay of groups with a wd_mult of 1.
  double weight_decay() const { return config_.weight_decay; }

  /// Steps made; skipped ones do not count.
  int64_t num_steps() const { return num_steps_; }

  /// All that this rank holds, in the order of the models, of their buffers and of the elements in
  /// a buffer. Every element of every parameter that is trained is on some rank; which other ranks
  /// hold a copy follows from the description and from DistributedDataParallel::is_sharded().
  std::vector<StateSlice> state_slices() const;
  OptimizerProgress progress() const { return {num_steps_, scaler_->state()}; }
  /// A constant loss scale remains the configured one, whatever the scale of `progress`.
  /// ConfigError: a negative number of steps, and those of GradScaler::restore().
  void restore(const OptimizerProgress& progress);

  /// Updates the parameters after master weights were written to state_slices(): rounds the master
  /// weights, and with the distributed optimizer gathers the parameters, which is then collective.
  /// Parameters without master weights do not change.
  void apply_master_weights();
  /// The other direction: copies the parameters to the master weights after the parameters were
  /// changed (loaded weights, an initialization).
  void reload_model_params();

  /// Bytes of the state, wherever it is stored.
  int64_t state_bytes() const;

  /// Whether the state is in the host's memory while the models are on a device.
  bool is_offloaded() const { return offloaded_; }

  /// The models whose parameters it updates.
  const std::vector<DistributedDataParallel*>& models() const { return models_; }

 private:
  /// All parameters that this rank owns. `control`: a kernels::StepControl.
  void update(const at::Tensor& control);

  /// Null without a rule of the caller's own.
  const UpdateStatement* own_statement() const;

  /// Groups the parameters and allocates the state.
  void make_states(const std::vector<ParamOverride>& overrides);

  std::vector<DistributedDataParallel*> models_;
  OptimizerConfig config_;
  std::shared_ptr<const UpdateRule> own_rule_;
  std::vector<ParamGroup> groups_;
  std::vector<size_t> group_of_;
  std::vector<OptimizerState> states_;      ///< of each buffer
  std::unique_ptr<CountedRanges> counted_;  ///< by the norm
  std::unique_ptr<CountedRanges> zeros_;    ///< among which zeros are counted, if they are
  std::unique_ptr<GradScaler> scaler_;
  int64_t num_steps_ = 0;
  bool numbers_on_device_ = false;
  bool offloaded_ = false;
};

std::unique_ptr<Optimizer> make_optimizer(std::vector<DistributedDataParallel*> models,
                                          const OptimizerConfig& config,
                                          const std::vector<ParamOverride>& overrides = {},
                                          std::shared_ptr<const UpdateRule> rule = nullptr);

}  // namespace lockstep
