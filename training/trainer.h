#pragma once

#include <functional>
#include <memory>
#include <string>

#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/gpt/gpt_model.h"
#include "lockstep/optimizer/distributed_optimizer.h"
#include "lockstep/optimizer/param_scheduler.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/training/data/text_dataset.h"
#include "lockstep/training/metrics.h"
#include "lockstep/training/run_setup.h"

namespace lockstep {

/// What is told of a run while it goes. Any member may be empty.
struct TrainCallbacks {
  std::function<void(const IterationMetrics&)> iteration;
  std::function<void(const ValidationMetrics&)> validation;
  /// Asked in every iteration; once any rank answers true, all ranks end after that iteration.
  std::function<bool()> should_stop;
};

/// Trains the reference GPT on text. Loss, gradients and weights do not depend on the number of
/// data-parallel ranks, apart from rounding.
class Trainer {
 public:
  /// Reads the text, builds the model with its initial weights, wraps it. Collective over all
  /// ranks, with the same `config` (see parallel_options()). Errors as of the parts: ConfigError,
  /// FileError.
  Trainer(const Config& config, const ParallelState& parallel_state);

  /// One iteration: all micro-batches of this rank, gradient reduction, clipping, update.
  /// `stop_requested` is combined over the ranks into stop_requested(). Every
  /// parallel.desync_check_interval iterations the ranks compare what they have communicated.
  IterationMetrics train_step(bool stop_requested = false);

  /// The mean loss over the front of the validation text, train.eval_iters global batches at most.
  ValidationMetrics validate() const;

  /// train_step() until train.train_iters, with validate() every train.eval_interval iterations and
  /// at the end.
  void run(const TrainCallbacks& callbacks);

  /// With ddp.overlap_param_gather operators wait for parameters that are still under way; after
  /// run() none is.
  const GPTModel& model() const { return *model_; }
  int64_t iteration() const { return iteration_; }
  bool stop_requested() const { return stop_requested_; }
  /// The configuration with the batch size that was worked out.
  const Config& config() const { return config_; }

 private:
  /// Sums over tokens, on this rank or on all.
  struct TokenSums {
    double loss = 0;
    double tokens = 0;
    double stop = 0;
  };

  TokenSums forward_backward() const;
  TokenSums sum_over_ranks(const TokenSums& local, const char* label) const;

  Config config_;
  ParallelState parallel_state_;
  ProcessGroup data_parallel_;
  BatchSizes batch_;
  TextSplit text_;
  SampleOrder samples_;
  std::shared_ptr<GPTModel> model_;
  std::unique_ptr<DistributedDataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
  OptimizerParamScheduler scheduler_;
  int64_t iteration_ = 0;
  int64_t consumed_samples_ = 0;
  bool stop_requested_ = false;
};

}  // namespace lockstep
