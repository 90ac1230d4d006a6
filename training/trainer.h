#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/datasets/microbatch_loader.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/metrics.h"
#include "lockstep/training/run_end.h"
#include "lockstep/training/run_setup.h"
#include "lockstep/training/training_model.h"

namespace lockstep {

/// What is told of a run while it goes. Any member may be empty.
struct TrainCallbacks {
  std::function<void(const IterationMetrics&)> iteration;
  std::function<void(const ValidationMetrics&)> validation;
  /// Asked in every iteration; once any rank answers something else than none, all ranks end after
  /// that iteration.
  std::function<RunEnd()> should_stop;
  /// After each iteration and its validation, and once more at the end (`last`), on all ranks: the
  /// place to save. A run that was stopped saves before its last validation, one that diverged not
  /// at all.
  std::function<void(bool last)> checkpoint;
};

/// Trains the reference GPT on text. Loss, gradients and weights do not depend on the layout over
/// the ranks, apart from rounding.
class Trainer {
 public:
  /// Reads the text, builds this rank's part of the model with its initial weights, wraps it.
  /// Collective over all ranks, with the same `config` (see parallel_options()). Errors as of
  /// check_supported(), check_layout() and of the parts: ConfigError, FileError.
  Trainer(const Config& config, const ParallelState& parallel_state);

  /// One iteration: all micro-batches of this rank, gradient reduction, clipping, update.
  /// What this and the other ranks wish becomes end(). Every parallel.desync_check_interval
  /// iterations the ranks compare what they have communicated.
  IterationMetrics train_step(RunEnd wish = RunEnd::none);

  /// Has `action` called in the next train_step(), before anything changes that state() holds.
  void before_next_update(std::function<void()> action) { before_update_ = std::move(action); }

  /// The mean loss over the front of the validation text, train.eval_iters global batches at most.
  ValidationMetrics validate() const;

  /// train_step() until train.train_iters, with validate() every train.eval_interval iterations and
  /// at the end. A run that was loaded at its end does nothing. Returns end(). A run that diverges
  /// (train.max_skipped_steps) ends after telling of the iteration, without a validation, or after
  /// a validation whose loss is not a number.
  RunEnd run(const TrainCallbacks& callbacks);

  /// The first chunk of the model on this rank; all of it where tp and pp have one rank. With
  /// ddp.overlap_param_gather operators wait for parameters that are still under way; after run()
  /// none is.
  const GPTModel& model() const { return *model_->chunks().front(); }
  /// What this rank holds of the model.
  const TrainingModel& training_model() const { return *model_; }
  int64_t iteration() const { return iteration_; }
  /// How the run ends, by the last iteration; the same on all ranks.
  RunEnd end() const { return end_; }
  /// Of a run that diverged: "iteration 12: the loss is not a number".
  std::string divergence() const;
  /// Of a run that diverged: the last iteration whose weights gave a finite loss and, where
  /// loss_scale_is_in_doubt() does not say otherwise, a finite gradient.
  int64_t last_good_iteration() const;
  /// Of a run that diverged by skipped steps: whether its loss scale may be too large for good
  /// weights.
  bool loss_scale_is_in_doubt() const;
  /// The configuration with the batch size that was worked out and what the device means.
  const Config& config() const { return config_; }
  const BatchSchedule& batches() const { return batches_; }

  /// What a checkpoint holds of this rank: the weights, and the optimizer's state if that is
  /// wanted.
  std::vector<StateTensor> state(bool with_optimizer);
  TrainingProgress progress() const;
  /// Goes on from a checkpoint that any layout saved; all ranks load the same. `weights_only`: the
  /// run starts at iteration 0 with its weights. First each rank reads what it needs (FileError as
  /// load_state(), also where the optimizer's state is missing), then, collectively, all go on from
  /// it (FileError as check_weights_are_finite()).
  void read(CheckpointReader& checkpoint, bool weights_only);
  void go_on_from(const CheckpointReader& checkpoint, bool weights_only);
  /// Both.
  void load(CheckpointReader& checkpoint, bool weights_only);

 private:
  /// What all ranks know of an iteration or a validation.
  struct GlobalSums {
    double loss = 0;  ///< nats, over all tokens
    double tokens = 0;
    RunEnd wish = RunEnd::none;
  };

  BatchInput training_batch();
  GPTInput validation_batch(const std::vector<int64_t>& samples) const;
  GPTInput make_input(const std::vector<int64_t>& ids) const;
  /// fp64 [kNumSums] on the device, the same on all ranks.
  at::Tensor sum_over_ranks(const LossSums& local, RunEnd wish, const char* label) const;
  /// Of the values of sum_over_ranks().
  GlobalSums global_sums(const double* values) const;
  RunEnd end_after(RunEnd wish) const;
  void validate_and_tell(const TrainCallbacks& callbacks);

  Config config_;
  ParallelState parallel_state_;
  int64_t data_parallel_rank_;
  int64_t data_parallel_size_;
  BatchSchedule batches_;
  std::unique_ptr<SampleSource> validation_;
  std::unique_ptr<MicrobatchLoader> loader_;
  std::unique_ptr<TrainingModel> model_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler scheduler_;
  int64_t iteration_ = 0;
  int64_t consumed_samples_ = 0;
  int64_t skipped_steps_ = 0;  ///< in a row, until now
  /// Of the line of the last iteration in metrics.jsonl.
  std::optional<uint32_t> metrics_checksum_;
  const char* bad_loss_ = nullptr;  ///< kLoss or kValidationLoss, where that is not a number
  RunEnd end_ = RunEnd::none;
  std::function<void()> before_update_;
};

}  // namespace lockstep
