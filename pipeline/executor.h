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
/// Returns the input of the next virtual stage, on the job's device. The last stage returns the
/// loss, one element (a forward-only schedule ignores it, and it may be undefined). Stages pass one
/// floating-point tensor to each other. If a pipeline of one stage returns a loss that requires no
/// gradient, because all parameters are frozen, its backward does nothing.
///
/// A stage reads its own tokens and labels, and stores the loss values that it needs.
using PipelineStage = std::function<at::Tensor(int64_t microbatch, const at::Tensor& input)>;

struct PipelineExecutorOptions {
  /// Shape and dtype of the activations that stages pass on for a micro-batch. They must be the
  /// same on all pipeline ranks and between all stages; gradients have them too. Unset: a message
  /// of 64 bytes with shape and dtype precedes each activation, so only the sender needs to know
  /// them, and lengths may vary. With several chunks verify_collectives() needs it, because a
  /// planning rank does not know what higher ranks send.
  std::function<TensorShape(int64_t microbatch)> activation_shape = {};
  /// With a schedule that splits backward: where the layers of the stages leave their weight
  /// gradients; the one of their contexts. Unset: SplitBackward splits backward; see there for what
  /// the stages' operations must allow. Layers whose context has one are a UsageError then. What is
  /// recomputed is done by the B tasks whole: with recompute() set this.
  std::shared_ptr<DeferredGradients> deferred = {};
  /// Called for each backward task with the function that computes it; returns the gradient of the
  /// task's input, undefined on the first stage. Unset: the function is called. A planned rank may
  /// only record what another task did.
  std::function<at::Tensor(const PipelineTask& task, const std::function<at::Tensor()>& compute)>
      backward = {};
  /// The same for each weight task. Unset: the function is called.
  std::function<void(const PipelineTask& task, const std::function<void()>& compute)> weight = {};
  /// Where runs record their events; may be null.
  std::shared_ptr<PipelineTrace> trace = {};
};

/// Runs this rank's part of a schedule: its tasks in order, each on its received input, and the
/// transfers between them in the order of communication_steps() and early_receives(). Sends do not
/// block; no schedule that check_schedule() accepts can deadlock. With one chunk per rank, if all
/// forwards of the last rank come first (GPipe, forward only), a rank that is ahead of the next one
/// waits: a forward starts only once all earlier outputs but the last have been received; on a
/// device its stream waits. So at most two outputs wait to be sent, however slow a later stage is.
///
/// Between forward and backward of a micro-batch a stage's input and graph are kept. Its output is
/// freed once it is sent, unless an operation saved it. Gradients of parameters are accumulated
/// into .grad() in the order in which the rank's list has the backward tasks of the chunk. In
/// schedules of make_schedule() that is the order of the micro-batches, as if one rank ran them
/// all; another order adds the same numbers with other roundings. If DistributedDataParallel wraps
/// the parameters of a chunk, call set_num_microbatches(M) before the step: then each bucket is
/// reduced once it has the gradients of all M micro-batches.
///
/// If backward is split, B tasks compute the gradient of the input, and W tasks those of the
/// parameters, as far as layers defer them; these are added in the order of the W tasks. Without
/// `deferred` the W tasks compute all but those of recomputed functions: see SplitBackward.
///
/// The first run on a device starts each receive only when its turn comes, because the first launch
/// of a CUDA kernel loads it, which may wait for everything that runs on the device, including a
/// receive.
///
/// While a step of ParallelState::step_clock() is open, the tasks count as forward and backward of
/// that step.
class PipelineExecutor {
 public:
  /// `schedule` is for the ranks of group pp. On a device the call is collective over pp: see
  /// connect_pairs(). UsageError, naming rank and task: a schedule for another number of ranks, or
  /// one that check_schedule() refuses.
  PipelineExecutor(const ParallelState& parallel_state, PipelineSchedule schedule,
                   PipelineExecutorOptions options = {});
  ~PipelineExecutor();

  /// Runs the schedule once. `stages` are the chunks of this rank. All ranks of the pipeline must
  /// call it. If a stage throws or a transfer fails, the other ranks are notified and throw
  /// CommunicationError; the groups cannot be used afterwards. UsageError: a number of stages that
  /// is not the schedule's number of chunks, a stage that returns nothing or a tensor that does not
  /// match `activation_shape`, an output on another device, a loss of several elements, an output
  /// that does not depend on the input. In the first run of a pipeline of one stage also a loss
  /// that requires no gradient although parameters do: detached, an integer, or computed under
  /// NoGradGuard. Outside of a run `deferred` does not defer.
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
