#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "lockstep/checkpoint/training_state.h"
#include "lockstep/core/config.h"
#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/models/gpt_model.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/pipeline/executor.h"
#include "lockstep/training/recorded_work.h"

namespace lockstep {

class RepeatedTasks;

/// Sums over the tokens of several micro-batches.
struct LossSums {
  at::Tensor loss;  ///< nats: fp64 [] on the model's device, so that the host does not wait for it
  double tokens = 0;
};

/// Tokens, labels and positions of a micro-batch, the same on all ranks of tp and pp, this rank's
/// part over cp (see cut_for_context); `hidden` stays undefined.
struct BatchInput {
  BatchInput(GPTInput of_batch, std::optional<int64_t> number_of_labels = {})
      : input(std::move(of_batch)), labels(number_of_labels) {}

  GPTInput input;
  /// The number of labels other than kIgnoredLabel. Unset: they are counted, which waits for a
  /// device.
  std::optional<int64_t> labels;
};

/// This rank's part of the reference GPT, on any layout: its model chunks, the wrapper of each, and
/// the pipeline that runs micro-batches through all stages.
class TrainingModel {
 public:
  /// Called once for each micro-batch, in order.
  using BatchSource = std::function<BatchInput(int64_t microbatch)>;

  /// Builds the chunks with their initial weights (see GPTModelOptions::perform_initialization).
  /// Collective over all ranks. ConfigError as for stage_layout() and GPTModel.
  TrainingModel(const Config& config, const ParallelState& parallel_state,
                bool perform_initialization = true);
  TrainingModel(const TrainingModel&) = delete;
  TrainingModel& operator=(const TrainingModel&) = delete;

  /// Runs all micro-batches of one iteration of this data-parallel rank; call zero_grad_buffer()
  /// first. Gradients are multiplied by `loss_scale`. They are sums over tokens or, with
  /// ddp.calculate_per_token_loss = false, means of the means of micro-batches and ranks, however
  /// many tokens count in each. Returns the sums of this pipeline on the ranks that hold the loss,
  /// zeros on the others. ConfigError as for schedule_options().
  LossSums forward_backward(int64_t num_microbatches, double loss_scale, const BatchSource& source);

  /// Forward and backward of one micro-batch, whose gradients are not reduced: they stay this
  /// rank's own, in the buffers of wrappers(). Call zero_grad_buffer() before it and after it. Not
  /// for models with experts, virtual stages or sharded gradients.
  void backward_locally(double loss_scale, const BatchSource& source);

  /// The scalar that backward starts from, given the token losses of one of `num_microbatches`
  /// micro-batches: their sum, or their mean / num_microbatches, times `loss_scale`.
  at::Tensor loss_of_microbatch(const at::Tensor& losses, int64_t num_microbatches,
                                double loss_scale) const;

  /// Like forward_backward(), but without gradients and without dropout; micro-batches may have
  /// fewer sequences, and tokens whose label is kIgnoredLabel do not count. With experts or sharded
  /// parameters all ranks must run the same number of micro-batches, and with experts these must
  /// have the same number of tokens. Runs kEvaluatedTogether micro-batches for each pipeline stage,
  /// or fewer than twice as many, before it asks for the next ones; it holds the tokens of no more.
  LossSums evaluate(int64_t num_microbatches, const BatchSource& source);
  static constexpr int64_t kEvaluatedTogether = 64;

  /// Begins an iteration.
  void zero_grad_buffer();

  /// Reduces and normalizes the gradients; `tokens` are those of forward_backward(), as a number or
  /// as fp64 [] on the device. Updates the biases of the experts' routers, unless lora.rank freezes
  /// them.
  void finalize_gradients(double tokens);
  void finalize_gradients(const at::Tensor& tokens);

  /// Whether a layer on this rank multiplies in FP8.
  bool has_fp8() const;
  /// After the optimizer's step, with train.fp8: the scales of the next iteration. `applied`: see
  /// Fp8Scaling::end_step().
  void update_fp8_scales(const at::Tensor& applied);
  /// Discards what the forward and backward passes since the last iteration recorded for them.
  void forget_fp8_values();
  /// fp8_state(): what a checkpoint keeps for delayed scales, besides the weights that they belong
  /// to. look_at_fp8_scales(): call it after a checkpoint was loaded.
  std::vector<StateTensor> fp8_state() const;
  void look_at_fp8_scales();

  /// Call it instead of finalize_gradients(): the iteration then has no effect. All ranks must call
  /// it.
  void abandon_step();

  /// Returns when no parameter is in flight any more.
  void finish_param_sync();
  /// Gathers all parameters if they are sharded; otherwise finish_param_sync(). Collective over the
  /// data-parallel ranks. The parameters stay whole until the next zero_grad_buffer().
  void unshard();

  /// The chunks of this rank, in model order; a single one without virtual stages.
  const std::vector<std::shared_ptr<GPTModel>>& chunks() const { return chunks_; }

  /// The wrappers of the chunks that have parameters.
  std::vector<DistributedDataParallel*> wrappers() const;

 private:
  using LossOf = std::function<at::Tensor(const at::Tensor& losses)>;
  /// With backward.
  LossSums run(int64_t num_microbatches, const BatchSource& source, const LossOf& loss_of);
  /// The same; all micro-batches except the last replay the recording of one.
  LossSums run_recorded(int64_t num_microbatches, double loss_scale, const BatchSource& source,
                        const LossOf& loss_of);
  /// The loss of micro-batches, `averaged` of which are averaged in a step.
  LossOf prepare(int64_t averaged, double loss_scale);
  std::vector<PipelineStage> begin_run(const LossOf& loss_of);
  /// After begin_run(): adds to its sums.
  void run_stages(const std::vector<PipelineStage>& stages, int64_t num_microbatches,
                  bool forward_only, const BatchSource& source);
  void run_one(const BatchInput& batch);
  void record(const BatchInput& like, int64_t num_microbatches, double loss_scale);
  void note_recorded(const BatchInput& batch);
  const PipelineExecutor& executor(int64_t num_microbatches, bool forward_only);
  const BatchInput& input(int64_t microbatch);
  TensorShape activation_shape(int64_t microbatch);
  PipelineStage stage(size_t chunk);
  /// The token losses' part of stage(): adds them up and returns the loss.
  at::Tensor add_loss(const at::Tensor& losses, double counted);
  at::Tensor backward(const PipelineTask& task, const std::function<at::Tensor()>& compute);

  Config config_;
  ParallelState parallel_state_;
  std::shared_ptr<TokenLossScale> token_loss_scale_ = std::make_shared<TokenLossScale>();
  std::shared_ptr<DeferredGradients> deferred_;  ///< null unless the schedule splits backward
  std::vector<std::shared_ptr<GPTModel>> chunks_;
  std::vector<std::unique_ptr<DistributedDataParallel>> wrappers_;
  std::map<int64_t, DistributedDataParallel*> wrapper_of_chunk_;
  std::map<std::pair<int64_t, bool>, std::unique_ptr<PipelineExecutor>> executors_;

  /// Forward and backward of a micro-batch, with train.cuda_graph = microbatch.
  struct RecordedMicrobatch {
    RecordedMicrobatch(const ParallelState& state, const GPTInput& like, at::Tensor adds_to,
                       int64_t of_microbatches, double of_scale)
        : work(state),
          input(like, state),
          loss_sum(std::move(adds_to)),
          num_microbatches(of_microbatches),
          loss_scale(of_scale) {}
    bool is_of(int64_t microbatches, double scale) const {
      return work.is_recorded() && num_microbatches == microbatches && loss_scale == scale;
    }

    RecordedWork work;
    StaticInput input;
    at::Tensor loss_sum;       ///< that it adds to
    int64_t num_microbatches;  ///< of the iteration for which it was recorded, with its scale
    double loss_scale;
  };
  std::optional<RecordedMicrobatch> recorded_;
  bool has_run_ = false;  ///< an iteration, so every communicator exists

  // Of the run in progress.
  std::vector<PipelineStage> stages_;
  const BatchSource* source_ = nullptr;
  RepeatedTasks* tasks_ = nullptr;  ///< null: tasks run
  std::vector<BatchInput> inputs_;
  LossOf loss_of_;
  at::Tensor loss_sum_;
  double tokens_ = 0;
};

}  // namespace lockstep
