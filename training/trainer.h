#pragma once

#include <chrono>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <c10/core/StreamGuard.h>

#include "lockstep/checkpoint/replica_check.h"
#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/core/download.h"
#include "lockstep/datasets/microbatch_loader.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/audit_report.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/iteration_telemetry.h"
#include "lockstep/training/metrics.h"
#include "lockstep/training/recorded_work.h"
#include "lockstep/training/run_end.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/skipped_steps.h"
#include "lockstep/training/spikes.h"
#include "lockstep/training/training_model.h"

namespace lockstep {

/// Callbacks of a run. Any member may be empty. An exception from one ends Trainer::run(); an
/// iteration that was launched on a device by then counts as done.
struct TrainCallbacks {
  /// On a device the next iteration may already be launched; then state() and progress() are those
  /// of that iteration.
  std::function<void(const IterationMetrics&)> iteration;
  std::function<void(const ValidationMetrics&)> validation;
  std::function<void(const TestMetrics&)> test;
  /// Called in every iteration; once any rank returns something other than none, all ranks end
  /// after that iteration.
  std::function<RunEnd()> should_stop;
  /// Called on all ranks after each iteration and its validation, and once more at the end
  /// (`last`); save here. A run that was stopped saves before its last validation; one that
  /// diverged does not save.
  std::function<void(bool last)> checkpoint;
  /// Whether checkpoint(false) has something to do after that iteration; the same on all ranks.
  /// Empty: it may have something to do after each iteration, so run() waits for each.
  std::function<bool(int64_t iteration)> checkpoint_is_due;
  /// With train.on_spike = rewind, called after a spike was reported: loads the checkpoint to go
  /// back to on all ranks. Returns false if there is none; then the run continues without the
  /// update. Empty: there is none.
  std::function<bool()> go_back;
};

/// Trains the reference GPT on text. Loss, gradients and weights do not depend on the layout over
/// the ranks, apart from rounding; with train.fp8 that is rounding to 8 bits, see Fp8Scaling.
class Trainer {
 public:
  /// Reads the text, builds this rank's part of the model with its initial weights, and wraps it.
  /// Without `perform_initialization` call load() before a step: until then those weights are zeros
  /// that would start at random.
  /// Collective over all ranks, with the same `config` (see parallel_options()). Errors as
  /// check_supported(), check_layout() and the parts: ConfigError, FileError.
  Trainer(const Config& config, const ParallelState& parallel_state,
          bool perform_initialization = true);

  /// One iteration: all micro-batches of this rank, gradient reduction, clipping, update. The
  /// wishes of all ranks determine end(). Every parallel.desync_check_interval iterations the ranks
  /// compare what they have communicated, and every train.replica_check_interval iterations the
  /// copies that they hold; see check_replicas().
  IterationMetrics train_step(RunEnd wish = RunEnd::none);

  /// Calls `action` in the next train_step(), before anything in state() changes.
  void before_next_update(std::function<void()> action) { before_update_ = std::move(action); }

  /// The mean loss over the beginning of the validation text, at most train.eval_iters global
  /// batches.
  ValidationMetrics validate() const;

  /// Calls train_step() until train.train_iters, with validate() every train.eval_interval
  /// iterations and at the end. There a completed run is also tested on data.test_path. A run that
  /// was loaded at its end does nothing. Returns end(). A run that diverges
  /// (train.max_skipped_steps) ends after reporting the iteration, without a validation, or after a
  /// validation whose loss is not a number.
  ///
  /// On a device run() works one iteration ahead: it launches forward and backward of an iteration,
  /// then waits for the numbers of the previous one and reports them, so the device always has
  /// work. If those numbers end the run, the launched iteration has no effect: the run ends after
  /// the same iteration as on the CPU. run() catches up before each validation and each checkpoint
  /// that is due.
  ///
  /// With train.on_spike an update is skipped if the loss or the gradient norm exceeds the limits
  /// that follow from earlier iterations (see SpikeWindow). The device decides, from numbers that
  /// all ranks have, so the host does not wait. With rewind the run then goes back with
  /// callbacks.go_back and continues with the samples after the spike; the samples since the
  /// checkpoint are left out. Another spike before the next checkpoint would lead back to the same
  /// checkpoint, so it ends the run as diverged.
  ///
  /// With train.replica_check_interval the copies are also compared before each checkpoint that is
  /// due, so that what is saved is what all ranks have, and at the end of a completed run.
  RunEnd run(const TrainCallbacks& callbacks);

  /// The first chunk of the model on this rank; the whole model if tp and pp have one rank. With
  /// ddp.overlap_param_gather operators wait for parameters that have not arrived yet; after run()
  /// all have.
  const GPTModel& model() const { return *model_->chunks().front(); }
  /// This rank's part of the model.
  const TrainingModel& training_model() const { return *model_; }
  /// The last iteration that was launched.
  int64_t iteration() const { return iteration_; }
  /// How the run ends, according to the last iteration; the same on all ranks.
  RunEnd end() const { return end_; }
  /// For a run that diverged: "iteration 12: the loss is not a number".
  std::string divergence() const;
  /// For a run that diverged: the last iteration whose weights gave a finite loss and, where
  /// loss_scale_is_in_doubt() does not say otherwise, a finite gradient. The last one of all if
  /// only optimizer.grad_norm_skip_threshold has skipped steps, which changes no weight.
  int64_t last_good_iteration() const;
  /// For a run that diverged by skipped steps: whether its loss scale may be too large for good
  /// weights.
  bool loss_scale_is_in_doubt() const;
  /// The configuration with the computed batch size and the defaults of the device.
  const Config& config() const { return config_; }
  const BatchSchedule& batches() const { return batches_; }
  /// Notes about the data, to be reported to the user.
  const std::vector<std::string>& notes() const { return notes_; }

  /// This rank's part of a checkpoint: the weights and, if `with_optimizer`, the optimizer's state.
  /// Like progress(), it waits for an iteration in flight. Collective: call it on all ranks, even
  /// if only one uses the result.
  std::vector<StateTensor> state(bool with_optimizer);
  TrainingProgress progress();
  /// Whether the run has adapters (lora.rank) and the checkpoint has none. Then its weights are
  /// loaded as weights_only, and the adapters keep their initial values.
  bool starts_adapters(CheckpointReader& checkpoint) const;
  /// Continue from a checkpoint, whatever layout saved it; all ranks must load the same one.
  /// `weights_only`: only the weights change. A new Trainer then starts at iteration 0 with them;
  /// one that has made or loaded steps keeps its iteration, its samples and the optimizer's state.
  /// First each rank calls read() to read what it needs (FileError as load_state(), also if the
  /// optimizer's state is missing). Then all ranks call go_on_from(), which is collective
  /// (FileError as check_weights_are_finite()). If either fails, another load() may follow, which
  /// replaces all that they have changed.
  void read(CheckpointReader& checkpoint, bool weights_only);
  void go_on_from(const CheckpointReader& checkpoint, bool weights_only);
  /// Calls read() and then go_on_from().
  void load(CheckpointReader& checkpoint, bool weights_only);

  /// Compares the copies that several ranks hold: weights, registered buffers and the optimizer's
  /// state. Of sharded weights (optim_grads_params) it compares the shards. An iteration of
  /// train.replica_check_interval does this before its update. Weights and state without a copy are
  /// then compared with their values after the previous update; only load() may write them in
  /// between. The iteration also compares the reduced gradients, unless they are sharded. If
  /// train.cuda_graph records the step, the state is compared after the iteration instead, without
  /// gradients and without values that have no copy. CommunicationError on all ranks, naming
  /// iteration, tensor and ranks; see ReplicaCheck. Collective over the world; waits for the
  /// iteration in flight.
  void check_replicas();

  /// Each data-parallel rank computes the gradients of its first micro-batch of the next iteration,
  /// then those of the next rank's first micro-batch, and compares the fingerprints of the latter
  /// with that rank's own. With the same weights and samples they are the same, unless one of the
  /// two ranks computes wrongly. A single rank compares with itself. The run's state does not
  /// change. The run does this before each iteration of train.replay_interval; on a device it needs
  /// train.deterministic. CommunicationError on all ranks, naming the iteration, both ranks and the
  /// first parameter. Collective over the world; waits for the iteration in flight. Not for models
  /// with experts, virtual stages or sharded gradients.
  void replay();

  /// Measures what happens to each gradient: see lockstep::audit(). Call it between iterations, on
  /// all ranks. It does not change how the run continues.
  AuditReport audit();

 private:
  /// What all ranks know of an iteration or a validation.
  struct GlobalSums {
    double loss = 0;  ///< nats, over all tokens
    double tokens = 0;
    RunEnd wish = RunEnd::none;
  };

  /// An iteration that was launched, and what is known of it without waiting.
  struct InFlight {
    IterationMetrics metrics;
    std::chrono::steady_clock::time_point begin;
    /// The numbers of sum_over_ranks(), of IterationTelemetry, then of Optimizer::start_step().
    Download numbers;
    SpikeLimits limits = {};
    int64_t samples = 0;  ///< of its global batch
  };

  /// Launches an iteration and settles the previous one on the way. If that one ends the run,
  /// nothing that is launched has a lasting effect.
  void start_step(RunEnd wish);
  /// Where the schedules of the learning rate and weight decay are. As in Megatron Core, a skipped
  /// step does not advance them.
  int64_t scheduled_samples() const;
  /// Both launch an iteration up to its update: the first operation by operation, the second from
  /// what was recorded. They return its numbers on the device, or an undefined tensor if the
  /// previous iteration ends the run.
  at::Tensor launch(const BatchSizes& batch, RunEnd wish);
  at::Tensor launch_recorded(const BatchSizes& batch, RunEnd wish);
  void record_step(const std::vector<BatchInput>& like);
  /// Launches what follows backward; `of_host` is what host_numbers() and IterationTelemetry
  /// return, on the device.
  at::Tensor update_after(const at::Tensor& loss, const at::Tensor& of_host);
  /// fp64 [2]: tokens of this rank's micro-batches, and its wish for the end.
  at::Tensor host_numbers(double tokens, RunEnd wish) const;
  /// Waits for the iteration in flight, if there is one; appends its metrics to settled_. Returns
  /// whether it ends the run.
  bool settle();
  /// Whether the next iteration may be launched before this one is settled.
  bool may_run_ahead(const TrainCallbacks& callbacks) const;
  bool validation_is_due() const;
  bool replica_check_is_due(int64_t iteration) const;
  bool replay_is_due(int64_t iteration) const;
  /// The fingerprints of the gradients of the next first micro-batch of data-parallel rank `rank`.
  std::vector<int64_t> gradient_fingerprints(int64_t rank);
  bool checks_replicas() const;
  ReplicaCheck& state_check();
  /// Runs in the launched iteration, after its gradients were finalized.
  void check_before_update();
  /// After its update, for the check of the next one.
  void remember_state();
  void forget_state();
  /// After a recorded iteration, inside which nothing can be checked.
  void check_recorded_step();
  void tell_iterations(const TrainCallbacks& callbacks);
  static SampleSources open_sources(const Config& config);
  BatchInput training_batch();
  BatchInput batch_input(const Microbatch& microbatch) const;
  /// The batch of these samples; only the first `counted` count.
  BatchInput evaluation_batch(SampleSource& source, const std::vector<int64_t>& samples,
                              int64_t counted) const;
  /// The mean loss over the beginning of `source`, at most train.eval_iters global batches. `label`
  /// names the sum.
  double mean_loss(SampleSource& source, const char* label) const;
  /// fp64 [1 + of_host] on the device, the same on all ranks.
  at::Tensor sum_over_ranks(const at::Tensor& loss, const at::Tensor& of_host,
                            const char* label) const;
  /// Takes the values of sum_over_ranks().
  GlobalSums global_sums(const double* values) const;
  RunEnd end_after(int64_t iteration, RunEnd wish) const;
  /// Whether optimizer.grad_norm_skip_threshold alone has ended the run.
  bool has_only_large_norms() const;
  bool looks_for_spikes() const { return config_.train.on_spike != OnSpike::none; }
  /// The limits of the step with these sums.
  Optimizer::StepLimits step_limits(const at::Tensor& over_ranks) const;
  void note_spike(const IterationMetrics& metrics);
  /// After a spike. Returns whether the run continues elsewhere, or has ended.
  bool go_back(const TrainCallbacks& callbacks);
  void validate_and_tell(const TrainCallbacks& callbacks);
  void test_and_tell(const TrainCallbacks& callbacks);

  /// Iterations with train.cuda_graph = step.
  struct RecordedStep {
    explicit RecordedStep(const ParallelState& state) : work(state) {}

    RecordedWork work;
    std::vector<StaticInput> inputs;  ///< of the micro-batches
    at::Tensor of_host, numbers;      ///< see update_after()
  };

  Config config_;
  ParallelState parallel_state_;
  /// On a device with graphs: the stream of this thread as long as the Trainer lives. The default
  /// stream cannot be recorded.
  std::unique_ptr<c10::StreamGuard> stream_;
  int64_t data_parallel_rank_;
  int64_t data_parallel_size_;
  BatchSchedule batches_;
  std::unique_ptr<SampleSource> validation_;
  std::unique_ptr<SampleSource> test_;  ///< null without data.test_path
  std::vector<std::string> notes_;
  std::unique_ptr<MicrobatchLoader> loader_;
  std::unique_ptr<TrainingModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  std::unique_ptr<IterationTelemetry> telemetry_;
  std::unique_ptr<RecordedStep> recorded_;
  OptimizerParamScheduler scheduler_;
  int64_t iteration_ = 0;  ///< the last that was launched
  int64_t consumed_samples_ = 0;
  int64_t skipped_samples_ = 0;  ///< of these, in steps that were skipped
  int64_t launched_ = 0;         ///< iterations of this object
  std::optional<InFlight> in_flight_;
  std::chrono::steady_clock::time_point settled_at_;
  std::deque<IterationMetrics> settled_;  ///< still to be reported
  SkippedSteps skipped_;
  /// The checksum of the last iteration's line in metrics.jsonl.
  std::optional<uint32_t> metrics_checksum_;
  SpikeWindow spikes_;
  SpikeLimits limits_;  ///< of the step that is launched
  int64_t left_out_samples_ = 0;
  bool goes_back_ = false;            ///< for the spike that was settled last
  std::optional<int64_t> came_from_;  ///< iteration of the checkpoint that the run went back to
  std::string spike_again_;           ///< what ended the run, if a spike occurred again
  const char* bad_loss_ = nullptr;    ///< kLoss or "validation loss", if that is not a number
  RunEnd end_ = RunEnd::none;
  std::unique_ptr<ReplicaCheck> state_check_, gradient_check_;           ///< made when first needed
  std::map<int64_t, std::unique_ptr<MicrobatchLoader>> replay_loaders_;  ///< by data-parallel rank
  std::optional<int64_t> compared_after_;  ///< the iteration whose state was compared last
  std::function<void()> before_update_;
};

}  // namespace lockstep
