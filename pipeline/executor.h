#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/core/deferred_gradients.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/pipeline/schedule.h"
#include "lockstep/pipeline/trace.h"
#include "lockstep/pipeline/transfer.h"

namespace lockstep {

/// The forward of one model chunk for micro-batch `microbatch`. `input` is the output of the
/// previous virtual stage (undefined on the first); it requires a gradient if there is a backward.
/// Returns the input of the next virtual stage. The last stage returns the loss, one element (a
/// forward-only schedule ignores it, and it may be undefined). Stages pass one floating-point tensor
/// to each other.
///
/// A stage reads its own tokens and labels, and stores what it needs of the loss.
using PipelineStage = std::function<at::Tensor(int64_t microbatch, const at::Tensor& input)>;

struct PipelineExecutorOptions {
  /// Shape and dtype of what the stages pass on for a micro-batch, the same on all ranks of the
  /// pipeline and between all stages; gradients have it too. Unset: each activation is preceded by
  /// a message that tells (64 bytes), so that only the sender need know, and lengths may vary.
  std::function<TensorShape(int64_t microbatch)> activation_shape = {};
  /// With a schedule that splits backward: where the layers of the stages leave their weight
  /// gradients. Unset: backward is split by SplitBackward, which see for what the stages'
  /// operations must allow.
  std::shared_ptr<DeferredGradients> deferred = {};
  /// Where runs note what they did when; may be null.
  std::shared_ptr<PipelineTrace> trace = {};
};

/// Runs this rank's part of a schedule: its tasks in order, each on the input that has come, and
/// the transfers between them as communication_steps() and early_receives() order them. Sends block
/// nobody; no schedule that check_schedule() accepts can lock up.
///
/// Between forward and backward of a micro-batch a stage's input and graph are kept, but not its
/// output, once it is sent, unless an operation saved it. Gradients of parameters are accumulated
/// into .grad() in the order of the micro-batches, as if one rank ran them all. With
/// DistributedDataParallel around the parameters of a chunk call set_num_microbatches(M) before the
/// step: then each bucket is reduced when the last micro-batch of the chunk has come by.
///
/// Where backward is split, B tasks give the gradient of the input and W tasks those of the
/// parameters, as far as layers defer them.
///
/// The first run on a device starts each receive only when its turn comes, because the first launch
/// of a CUDA kernel loads it, which may wait for all that runs on the device, a receive too.
///
/// While a step of ParallelState::step_clock() is open, tasks count as its forward and backward.
class PipelineExecutor {
 public:
  /// `schedule` is for the ranks of group pp. Collective over it on a device: see connect_pairs().
  /// UsageError, naming rank and task: a schedule for
  /// another number of ranks, or one that check_schedule() refuses.
  PipelineExecutor(const ParallelState& parallel_state, PipelineSchedule schedule,
                   PipelineExecutorOptions options = {});
  ~PipelineExecutor();

  /// Runs the schedule once. `stages` are the chunks of this rank. All ranks of the pipeline call
  /// it. Where a stage throws, or a transfer fails, the other ranks are told and end with
  /// CommunicationError; the groups cannot be used afterwards. UsageError: another number of stages
  /// than the schedule's chunks, a stage that returns nothing or something else than
  /// `activation_shape` says, a loss of several elements, an output that does not depend on the
  /// input. Outside of a run `deferred` does not defer.
  void run(const std::vector<PipelineStage>& stages) const;

  const PipelineSchedule& schedule() const;

 private:
  struct Plan;
  class Run;
  std::unique_ptr<const Plan> plan_;
  std::unique_ptr<SendQueue> sends_;  ///< of all runs
  mutable std::atomic<bool> has_run_ = false;
};

}  // namespace lockstep
