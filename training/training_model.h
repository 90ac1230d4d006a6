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

class TopKRouter;

/// Sums over the tokens of some micro-batches.
struct LossSums {
  at::Tensor loss;  ///< nats: fp64 [] on the device of the model, so that nobody waits for it
  double tokens = 0;
};

/// Tokens, labels and positions of a micro-batch, the same on all ranks of tp and pp, this rank's
/// part over cp (see cut_for_context); `hidden` stays undefined.
struct BatchInput {
  BatchInput(GPTInput of_batch, std::optional<int64_t> number_of_labels = {})
      : input(std::move(of_batch)), labels(number_of_labels) {}

  GPTInput input;
  /// Those that are not kIgnoredLabel. Unset: they are counted, which waits for a device.
  std::optional<int64_t> labels;
};

/// What this rank holds of the reference GPT on any layout: its model chunks, the wrapper of each,
/// and the pipeline that runs micro-batches through all stages.
class TrainingModel {
 public:
  /// Is called for each micro-batch once, in their order.
  using BatchSource = std::function<BatchInput(int64_t microbatch)>;

  /// Builds the chunks with their initial weights (see GPTModelOptions::perform_initialization).
  /// Collective over all ranks. ConfigError as stage_layout() and GPTModel.
  TrainingModel(const Config& config, const ParallelState& parallel_state,
                bool perform_initialization = true);
  TrainingModel(const TrainingModel&) = delete;
  TrainingModel& operator=(const TrainingModel&) = delete;

  /// All micro-batches of one iteration of this data-parallel rank; zero_grad_buffer() came before.
  /// Gradients are multiplied by `loss_scale`. They are sums over tokens, or with
  /// ddp.calculate_per_token_loss = false means: of the means of micro-batches and ranks, whatever
  /// the number of tokens that count in each. Returns the sums of this pipeline on the ranks
  /// that hold the loss, zeros on the others. ConfigError as schedule_options().
  LossSums forward_backward(int64_t num_microbatches, double loss_scale, const BatchSource& source);

  /// Forward and backward of one micro-batch, whose gradients are not reduced: they are this rank's
  /// own, in the buffers of wrappers(), until zero_grad_buffer(), which comes before and after it.
  /// Not for models with experts, virtual stages or sharded gradients.
  void backward_locally(double loss_scale, const BatchSource& source);

  /// What backward starts from, of the losses of the tokens of one of `num_microbatches`: their
  /// sum, or their mean / num_microbatches, times `loss_scale`.
  at::Tensor loss_of_microbatch(const at::Tensor& losses, int64_t num_microbatches,
                                double loss_scale) const;

  /// The same without gradients and without dropout; micro-batches may have fewer sequences, and
  /// tokens whose label is kIgnoredLabel do not count. With experts or sharded parameters all ranks
  /// must run as many micro-batches, with experts of as many tokens.
  LossSums evaluate(int64_t num_microbatches, const BatchSource& source);

  /// Begins an iteration.
  void zero_grad_buffer();

  /// Reduces and normalizes the gradients; `tokens` are those of forward_backward(), as a number or
  /// as fp64 [] on the device. Moves the biases of the experts' routers, unless lora.rank freezes
  /// them.
  void finalize_gradients(double tokens);
  void finalize_gradients(const at::Tensor& tokens);

  /// After finalize_gradients(), with train.fp8: the scales of the next iteration.
  void update_fp8_scales();
  /// Forgets what the forward and backward passes since the last iteration noted for them.
  void forget_fp8_values();
  /// What a checkpoint keeps of delayed scales, beside the weights that they belong to; and to be
  /// called once it was loaded.
  std::vector<StateTensor> fp8_state() const;
  void look_at_fp8_scales();

  /// Instead of finalize_gradients(): the iteration leaves no trace. All ranks must call it.
  void abandon_step();

  /// Returns when no parameter is under way any more.
  void finish_param_sync();
  /// Gathers all parameters where they are sharded; elsewhere finish_param_sync(). Collective over
  /// the data-parallel ranks. They stay until the next zero_grad_buffer().
  void unshard();

  /// The chunks of this rank, in the order of the model; one without virtual stages.
  const std::vector<std::shared_ptr<GPTModel>>& chunks() const { return chunks_; }

  /// Of the chunks that have parameters.
  std::vector<DistributedDataParallel*> wrappers() const;

 private:
  using LossOf = std::function<at::Tensor(const at::Tensor& losses)>;
  LossSums run(int64_t num_microbatches, bool forward_only, const BatchSource& source,
               const LossOf& loss_of);
  /// The same with backward, all micro-batches but the last from what was recorded of one.
  LossSums run_recorded(int64_t num_microbatches, double loss_scale, const BatchSource& source,
                        const LossOf& loss_of);
  /// Of micro-batches that are `averaged` in a step.
  LossOf prepare(int64_t averaged, double loss_scale);
  std::vector<PipelineStage> begin_run(const LossOf& loss_of);
  void run_one(const BatchInput& batch);
  void record(const BatchInput& like, int64_t num_microbatches, double loss_scale);
  void note_recorded(const BatchInput& batch);
  std::vector<std::shared_ptr<TopKRouter>> routers() const;
  const PipelineExecutor& executor(int64_t num_microbatches, bool forward_only);
  const BatchInput& input(int64_t microbatch);
  TensorShape activation_shape(int64_t microbatch);
  PipelineStage stage(size_t chunk);

  Config config_;
  ParallelState parallel_state_;
  std::shared_ptr<TokenLossScale> token_loss_scale_ = std::make_shared<TokenLossScale>();
  std::shared_ptr<DeferredGradients> deferred_;  ///< null unless the schedule splits backward
  std::vector<std::shared_ptr<GPTModel>> chunks_;
  std::vector<std::unique_ptr<DistributedDataParallel>> wrappers_;
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
    at::Tensor loss_sum;       ///< to which it adds
    int64_t num_microbatches;  ///< of the iteration for which it was recorded, with its scale
    double loss_scale;
  };
  std::optional<RecordedMicrobatch> recorded_;
  bool has_run_ = false;  ///< an iteration, so that every communicator is there

  // Of the run under way.
  std::vector<PipelineStage> stages_;
  const BatchSource* source_ = nullptr;
  std::vector<BatchInput> inputs_;
  LossOf loss_of_;
  at::Tensor loss_sum_;
  double tokens_ = 0;
};

}  // namespace lockstep
