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

/// One range of one parameter, and what the optimizer knows of it.
struct StateSlice {
  /// A flat tensor of range.numel() elements, a view of the optimizer's memory.
  struct Values {
    std::string name;  ///< "master", or as the update rule states: "exp_avg", "momentum_buffer"
    at::Tensor tensor;
  };
  std::string parameter;         ///< as in NamedParameter
  ParamDescription description;  ///< of the parameter
  std::vector<int64_t> shape;    ///< of the parameter on this rank
  ElementRange range;            ///< elements of the flattened parameter on this rank
  std::vector<Values> values;    ///< "master" only where the parameter is bf16 or fp16
};

/// What changes from step to step besides the tensors. The same on all ranks. Learning rates and
/// weight decay that somebody set are not among it: set them again, or apply the schedule.
struct OptimizerProgress {
  int64_t num_steps = 0;
  GradScalerState scaler = {};
  bool operator==(const OptimizerProgress&) const = default;
};

/// Updates parameters on the flat buffers of DistributedDataParallel: one pass over contiguous
/// memory, unscaling and clipping included.
///
/// Models without ddp.use_distributed_optimizer: every rank holds the whole state and makes the
/// same step. Models with it: the state is cut over the data-parallel ranks (ZeRO-1). This rank
/// holds master weights and state of its shard alone, updates that shard of the parameters in their
/// buffer, and gets the others by all-gathers; see DistributedDataParallel::update_params(). On the
/// CPU a step that is skipped gathers nothing; on CUDA it gathers what has not changed. Bytes of a
/// rank for a parameter element over d ranks with adam, padding aside, parameters + gradients +
/// state: bf16 with fp32 gradients 2 + 4 + 12/d; fp32 4 + 4 + 8/d; fp64 8 + 8 + 16/d. Both give the
/// same bits on the same reduced gradients, apart from the gradient norm, whose terms are added in
/// another order.
///
/// The update is an UpdateRule of one's own, or the one that optimizer.optimizer chooses: adam
/// (AdamW), sgd (as torch.optim.SGD: the weight decay is added to the gradient), or muon, for the
/// matrices of buffers with holds_whole_matrices(), while the other parameters take adam:
///
///   m  = lerp(m, g, 1 - muon_momentum),  u = m, or lerp(g, m, muon_momentum) with Nesterov
///   p  = (1 - lr * weight_decay) * p - lr * muon_direction(u)
///
/// A matrix that is cut over tensor-parallel ranks is gathered for it (one all-gather over tp), so
/// that the update does not depend on the layout. The last dimension of a parameter is the columns,
/// all others together are the rows. The queries, keys and values of an attention layer lie in one
/// parameter; with muon_split_qkv each of the three is a matrix (see
/// ParamDescription::rows_of_matrices). Other matrices that lie in one parameter count as one.
///
/// fp32 and fp64 parameters are updated in place. bf16 and fp16 parameters have fp32 master
/// weights, from which they are rounded.
///
/// With optimizer.offload and models on a device, the state lies in the host's memory, where the
/// update is made, by the same rules and with the same bits. The device keeps no byte of it. In a
/// step the gradients that this rank updates with go to the host, with them the parameters where
/// there are no master weights or the update rule is one's own, and the parameters come back. The
/// host needs page-locked memory for these, of each element a gradient and a parameter; CUDA's
/// allocator rounds each buffer's up to a power of two.
///
/// Learning rate and weight decay are those of the parameter's group (see group_params()): by the
/// configuration, or by overrides. Groups change nothing in what is sent or saved.
///
/// The state can be saved and loaded through state_slices() and progress(), by anybody who can copy
/// flat tensors:
///
///     for (StateSlice& slice : optimizer.state_slices())
///       for (auto& [name, tensor] : slice.values)
///         tensor.copy_(saved_elements(name, slice.range));
///     optimizer.restore(saved_progress);
///     optimizer.apply_master_weights();      // or reload_model_params(), where weights alone came
class Optimizer {
 public:
  /// What step() did.
  struct StepResult {
    double grad_norm = 0;  ///< of the whole model, without the loss scale, before clipping
    bool skipped = false;  ///< nothing was changed, because of the norm; see skips_step()
    std::optional<int64_t> num_zeros = {};  ///< with optimizer.log_num_zeros_in_grad: count_zeros()
  };

  /// What else skips a step, the same on all ranks.
  struct StepLimits {
    /// A larger gradient norm of the whole model.
    double grad_norm = std::numeric_limits<double>::infinity();
    at::Tensor skip = {};  ///< bool [] on the device of the models that is true; may be undefined
    bool are_set() const { return skip.defined() || std::isfinite(grad_norm); }
  };

  /// The models must outlive the optimizer. `rule`, unless null, takes the place of
  /// optimizer.optimizer. Collective over dp-cp, tp and pp: the ranks compare `config`, the numbers
  /// of `overrides` and what `rule` states (CommunicationError, naming the field and two ranks),
  /// their tied parameters and those whose gradients are partial over pp, and agree on the loss
  /// scale. UsageError: no model, models with ddp.use_distributed_optimizer beside models without.
  /// ConfigError: a number out of its bounds, parameters of a dtype other than fp32, fp64, bf16 and
  /// fp16, a rule that keeps bf16 beside fp64 parameters, optimizer.offload with a rule of matrices
  /// (muon is one) for models on a device, muon or another rule of matrices without
  /// any that is whole (without pipeline and expert parallelism), copies of a tied parameter in
  /// groups with other settings, and those of group_params(); there is no look at other ranks for
  /// parameters that an override applies to, so one that applies to none is an error only without
  /// pipeline and expert parallelism. If some ranks find these, the others throw
  /// CommunicationError. CommunicationError: a tied parameter of which a stage lacks its copy.
  Optimizer(std::vector<DistributedDataParallel*> models, const OptimizerConfig& config,
            const std::vector<ParamOverride>& overrides = {},
            std::shared_ptr<const UpdateRule> rule = nullptr);

  ~Optimizer();
  Optimizer(const Optimizer&) = delete;
  Optimizer& operator=(const Optimizer&) = delete;

  /// One step with the final gradients: norm, clipping, update. Gradients are not changed. Call it
  /// on all ranks. On CUDA the norm decides on the device, and nothing waits for it before the
  /// update (and the gather of parameters) has been launched. UsageError if finalize_model_grads is
  /// still to be called.
  StepResult step();

  /// step() in two halves, for a loop that reads other numbers from the device with its own.
  /// start_step() launches the update and returns what the result follows from, fp64
  /// [kStepNumbers] on the device of the models; finish_step() takes these values on the host, and
  /// must come before anything else is done with the optimizer. If the state is offloaded, it makes
  /// the update, and must come before anything else is done with the models, too. On the CPU
  /// nothing is launched for a step that is skipped. `limits` skip a step too; finish_step() is
  /// told whether they did, `beyond_limits`. UsageError: limits after keep_numbers_on_device().
  static constexpr int64_t kStepNumbers = 2;
  at::Tensor start_step() { return start_step(StepLimits{}); }
  at::Tensor start_step(const StepLimits& limits);
  StepResult finish_step(const double* numbers, bool beyond_limits = false);

  /// For a step that is recorded once and launched many times, as a CUDA graph: from now on the
  /// updates find learning rates, weight decay and bias corrections in memory of the device, which
  /// upload_numbers() fills for the next step, before each start_step() and before each launch of
  /// one that was recorded. finish_step() follows each as ever. UsageError: an update rule without
  /// step_numbers(), such as muon; an offloaded state.
  void keep_numbers_on_device();
  void upload_numbers();

  /// What the loss of the next step must be multiplied by before backward; step() takes it out
  /// again. It is 1 unless optimizer.loss_scale is set or a parameter of any rank is fp16; see
  /// GradScaler. The same on all ranks.
  double loss_scale() const { return scaler_->scale(); }

  /// Those of this rank's parameters; the first one has the configuration's numbers.
  const std::vector<ParamGroup>& param_groups() const { return groups_; }
  /// The index there of each parameter, in the order of the models, of their buffers and of the
  /// parameters in a buffer.
  const std::vector<size_t>& group_of_params() const { return group_of_; }

  /// Sets learning rates and weight decay for an iteration that starts when `samples` are consumed:
  /// each group's by its own max_lr and min_lr.
  void apply_schedule(const OptimizerParamScheduler& scheduler, int64_t samples);

  /// Sets the learning rate of all groups with the configuration's max_lr and min_lr. UsageError,
  /// as for the other two: a number that is not finite or below 0.
  void set_learning_rate(double value);
  /// Sets that of param_groups()[group]. UsageError: there is no such group.
  void set_learning_rate(size_t group, double value);
  /// Each group takes its wd_mult times as much.
  void set_weight_decay(double value);
  /// Of the first group.
  double learning_rate() const { return groups_.front().lr; }
  /// Of groups with a wd_mult of 1.
  double weight_decay() const { return config_.weight_decay; }

  /// Steps made; skipped ones do not count.
  int64_t num_steps() const { return num_steps_; }

  /// All that this rank holds, in the order of the models, of their buffers and of the elements in
  /// a buffer. Every element of every parameter that is trained is on some rank; which others hold
  /// a copy follows from the description and from DistributedDataParallel::is_sharded().
  std::vector<StateSlice> state_slices() const;
  OptimizerProgress progress() const { return {num_steps_, scaler_->state()}; }
  /// ConfigError: a negative number of steps, and those of GradScaler::restore().
  void restore(const OptimizerProgress& progress);

  /// Makes the parameters follow master weights that somebody wrote into state_slices(): rounds
  /// them, and with the distributed optimizer gathers the parameters. Collective then. Parameters
  /// without master weights stay as they are.
  void apply_master_weights();
  /// The other direction: takes the master weights from the parameters again, after somebody
  /// changed those (loaded weights, an initialization).
  void reload_model_params();

  /// Bytes of the state, wherever it lies.
  int64_t state_bytes() const;

  /// Whether the state lies in the host's memory, while the models are on a device.
  bool is_offloaded() const { return offloaded_; }

  /// Whose parameters it updates.
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
