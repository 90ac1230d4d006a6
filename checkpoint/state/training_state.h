#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/checkpoint/checkpoint_reader.h"
#include "lockstep/checkpoint/tensor_box.h"
#include "lockstep/core/parameters.h"
#include "lockstep/optimizer/optimizer.h"
#include "lockstep/parallel_state/parallel_state.h"

/// What a run keeps in a checkpoint, described so that any other layout can read it: each tensor
/// has its global name and the part that this rank holds. The parts follow from the parameters'
/// descriptions; no layer is named here.
namespace lockstep {

/// A part of a tensor that this rank holds. Padding of the vocabulary is left out.
struct StateTensor {
  std::string name;   ///< global name of the parameter or registered buffer
  std::string state;  ///< empty for its value, else a part of the optimizer's state
  TensorPart part;
  at::Tensor values;  ///< [part.range.numel()], a view of the run's memory on any device
  /// Whether no other pipeline stage, and no other model chunk of this rank, has a tensor of this
  /// name: it is of a parameter that is described neither as tied nor as on all stages. The first
  /// save checks it. A registered buffer may be on several stages and counts as the same on all.
  bool on_one_stage = false;
  bool is_buffer = false;  ///< a registered buffer; its values need not be finite
};

/// Where a run stands. The same on all ranks, except metrics_checksum, for which only rank 0's
/// value counts.
struct TrainingProgress {
  int64_t iteration = 0;
  int64_t consumed_samples = 0;
  int64_t skipped_steps = 0;  ///< in a row, up to this iteration
  OptimizerProgress optimizer;
  /// checksum_of_line() of the iteration's line in metrics.jsonl.
  std::optional<uint32_t> metrics_checksum = {};
  ManifestSpikes spikes = {};
  int64_t skipped_samples = 0;  ///< of consumed_samples, in all skipped steps
};

/// The parameters, frozen ones included, and the registered buffers of `model`. With
/// ddp.overlap_param_gather wait for them first (finish_param_sync); with optim_grads_params call
/// unshard() of each DistributedDataParallel first, and keep the weights whole until a save has
/// copied them or load_state() has returned. Collective over the axes that cut parameters, whose
/// ranks may hold pieces of any lengths. UsageError: a parameter that is not contiguous, or that is
/// not gathered. CommunicationError: one that a rank of such an axis does not have.
std::vector<StateTensor> model_state(const torch::nn::Module& model, const ParallelState& state);

/// The same without the parameters that are trained: what kept_weights() leaves out. No gathered
/// parameter is needed for it.
std::vector<StateTensor> untrained_state(const torch::nn::Module& model,
                                         const ParallelState& state);

/// This rank's part of the optimizer's state. Collective as model_state().
std::vector<StateTensor> optimizer_state(const Optimizer& optimizer, const ParallelState& state);

/// The reduced gradients of `models`, with the state "gradient", except those that the distributed
/// optimizer shards. Call it between finalize_model_grads() and the next backward. Collective as
/// model_state().
std::vector<StateTensor> whole_gradients(const std::vector<DistributedDataParallel*>& models,
                                         const ParallelState& state);

/// The parameters in the buffers of `models` as this rank keeps them between steps: all, or with
/// optim_grads_params only its shard, which then has the state "shard". Views of the buffers.
/// Collective as model_state().
std::vector<StateTensor> kept_weights(const std::vector<DistributedDataParallel*>& models,
                                      const ParallelState& state);

/// Fills `targets` from a checkpoint, converted to their dtypes. If the checkpoint's own weights
/// are bf16 or fp16, and the targets have another dtype, weights are loaded from the master
/// weights, because rounding twice would give other values. Master weights are loaded from the
/// weights if the checkpoint has no master weights. FileError with the path: a tensor that is
/// missing, has another shape or is damaged.
///
/// An Optimizer keeps its own copy of bf16 and fp16 parameters, the master weights. After loading
/// its state, call Optimizer::apply_master_weights(). After loading weights alone into the model of
/// an Optimizer that exists already, call Optimizer::reload_model_params(): otherwise its next step
/// overwrites them.
void load_state(CheckpointReader& checkpoint, const std::vector<StateTensor>& targets);

/// Whether the checkpoint holds the optimizer's state.
bool has_optimizer_state(const Manifest& manifest);

/// FileError, on all ranks, if a tensor of the checkpoint belongs to none of `weights`, the model's
/// weights that the ranks hold; names the tensor. Collective: one all-reduce of one byte per
/// tensor.
void check_no_weight_left(const CheckpointReader& checkpoint,
                          const std::vector<StateTensor>& weights, const ParallelState& state);

/// FileError, on all ranks, if a weight (a parameter, or a master weight) is not finite: names
/// `path`, the rank, the tensor and the number of such elements; see must_be_finite(). Collective.
void check_weights_are_finite(const std::string& path, const std::vector<StateTensor>& tensors,
                              const ParallelState& state);

/// How many elements are NaN or infinite.
int64_t count_not_finite(const at::Tensor& values);

/// safetensors' name of a dtype, and back. UsageError for one that has none.
const char* safetensors_dtype(at::ScalarType dtype);
at::ScalarType dtype_of_safetensors(const std::string& name);

}  // namespace lockstep
