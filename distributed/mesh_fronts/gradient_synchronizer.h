#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/bucket_info.h"
#include "lockstep/distributed/mesh_parameters.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// What the loss is, and so what a reduced gradient means.
enum class GradientReduction {
  sum,        ///< the sum over the ranks; the caller applies any other scale
  mean,       ///< the mean over the ranks of the reduction
  per_token,  ///< for a loss that is a sum over tokens: the sum, divided by the tokens of all ranks
};

/// "sum", "mean", "per-token"
const char* to_string(GradientReduction reduction);

struct GradientSynchronizerOptions {
  GradientReduction reduction = GradientReduction::sum;
  /// The ranks whose tokens make up the batch: of all axes that split samples or sequences. For
  /// per_token only, and necessary there.
  std::optional<ProcessGroup> token_group = {};
  /// Gradients that a parameter lacks, in some or all micro-batches, count as zeros when wait() is
  /// called. Otherwise wait() throws. It still throws if some backwards of a step ran, but fewer
  /// than required; a backward that reaches no parameter of a bucket does not count there.
  bool allow_unused_parameters = false;
};

/// Data parallelism for parameters with placements on a mesh: no module, no wrapper. It derives
/// from the placements of each parameter which axes of its mesh need a reduction, and reduces the
/// gradients bucket by bucket inside the backward of the last micro-batch (on CUDA on a separate
/// stream). Modelled on d9d's class of this name.
///
///     GradientSynchronizer sync({parameters}, /*bucket_size_mb=*/32, /*require_accumulations=*/2);
///     sync.bind();
///     for (step) {
///       for (micro-batch, 2 of them) loss.backward();
///       sync.wait();
///       optimizer.step();
///       sync.zero_grad();
///     }
///
/// The gradient of a DTensor parameter is assumed to be one term of the sum over all axes on which
/// the parameter is replicated, except MeshParameter::complete_axes; nothing is communicated over
/// the other axes. For a described module the descriptions decide: see mesh_parameters(). Several
/// axes form one group, so there is one all-reduce. A parameter with no axis to reduce over, or a
/// plain tensor, is local: it gets no buffer and is not counted, and its gradient is undefined
/// until backward creates one.
///
/// Ranks that hold the same part of a parameter must start from the same values; nothing is
/// broadcast.
///
/// Buckets hold parameters of one parameter group, device, gradient dtype and group of ranks, in
/// reverse order. A bucket is one flat piece of memory of at most `bucket_size_mb`, counted as
/// local elements times the size of a gradient's element; a larger parameter has a bucket of its
/// own. Gradients are accumulated in place in it; at::Tensor::set_grad_dtype() chooses their dtype
/// (fp32 for bf16 parameters). All ranks launch in the same order, which follows from the lists of
/// parameters of all ranks: bind() compares them.
///
/// Misuse throws UsageError with names and counts, and the ranks that would wait for this one are
/// notified. Misuse means: one backward too many, a gradient that was replaced after the last
/// backward, a parameter without a gradient while others have all of theirs, a parameter that was
/// frozen in bind() and requires a gradient now, or the other way round (unless it is local), or a
/// missing, superfluous or negative num_tokens. A wait() before any parameter has all of its
/// gradients also throws, but the step can continue: the missing backwards may still run.
///
/// Between two micro-batches a gradient belongs to the caller, as in plain autograd: the next
/// backward adds to the current param.grad(), even if that is another tensor, whose value is then
/// copied into the bucket. If param.grad() was made undefined, accumulation starts again from zero.
/// A gradient that is undefined when wait() is called gets its view back, with what was
/// accumulated.
class GradientSynchronizer {
 public:
  /// `param_groups`: those of the optimizer. `bucket_size_mb`: in MiB. `require_accumulations`:
  /// backwards per step. Sends nothing yet. UsageError: a size that is not positive, a count below
  /// 1, an undefined tensor, a parameter in two groups, a name twice in one group, a token group
  /// without per_token or per_token without a token group, a parameter without a mesh that is
  /// described as cut, partial, tied or an expert's. Ranks that wait for this one in bind() are
  /// notified.
  GradientSynchronizer(std::vector<MeshParameters> param_groups, double bucket_size_mb,
                       int64_t require_accumulations, GradientSynchronizerOptions options = {});
  /// The parameters of `module` as one group, treated as their descriptions say. Also throws the
  /// UsageErrors of mesh_parameters().
  GradientSynchronizer(const torch::nn::Module& module, const ParallelState& state,
                       double bucket_size_mb, int64_t require_accumulations,
                       GradientSynchronizerOptions options = {});
  /// Removes the hooks. Gradients keep their values.
  ~GradientSynchronizer();
  GradientSynchronizer(const GradientSynchronizer&) = delete;
  GradientSynchronizer& operator=(const GradientSynchronizer&) = delete;

  /// Allocates zeroed buckets, makes the gradients views of them, and installs hooks on the
  /// parameters. Parameters that do not require a gradient are left out: after unfreezing one, call
  /// unbind() and bind() again. Collective over the ranks that share parameters: connects their
  /// groups and compares their parameters, gradient dtypes, complete_axes, descriptions, reduction,
  /// bucket size, backwards per step and allow_unused_parameters. If these differ, every rank
  /// throws CommunicationError with the first difference. For a described module bind() also
  /// compares, over tp, dp and cp, whether each parameter is trained, including parameters that are
  /// cut. UsageError: a parameter that is already bound, here or by another front; a Partial
  /// parameter; complete_axes on which the parameter is not replicated; a gradient dtype that is
  /// not set; a parameter that is not a leaf, is sparse or is expanded. If only some ranks find
  /// such an error, the others throw CommunicationError.
  void bind();

  /// Waits for reductions in progress, removes the hooks and frees the buckets. Gradients become
  /// undefined.
  void unbind();

  /// Returns when all gradients are reduced (on CUDA: makes the current stream wait). From then on
  /// they are the same on all ranks of their reduction. Without any bucket it does nothing.
  void wait();

  /// The same for per_token. `num_tokens`: this rank's tokens in all micro-batches of the step (one
  /// element). They are summed over the token group, and all gradients, including local ones, are
  /// divided by the sum (by 1 if it is less than 1).
  void wait(const at::Tensor& num_tokens);

  /// Sets the gradients to zero and those of local parameters to undefined, makes replaced
  /// gradients views again, and begins a step. UsageError while a reduction is in progress, or if
  /// all backwards of the step have come without one: call wait() first.
  void zero_grad();

  /// Abandons a step in which something threw and begins the next one, on all ranks. See
  /// DistributedDataParallel::abandon_step().
  void abandon_step();

  /// Sets the backwards per step for all following steps, for batches with different numbers of
  /// micro-batches. Call it between steps only. All ranks that share parameters must set the same
  /// count. It is not compared after bind(): if it differs, some ranks wait for others until the
  /// timeout.
  void set_required_accumulations(int64_t count);
  /// The same, under the name that DistributedDataParallel uses.
  void set_num_microbatches(int64_t count) { set_required_accumulations(count); }

  /// The gradient of `parameter`, a DTensor, with its current placements: Partial on the axes that
  /// are reduced, and Replicate on them after wait(). UsageError: `parameter` is not one of this
  /// object's parameters, is plain, or has no gradient; before wait(), also the mean of an expert's
  /// gradient, which no placement can express.
  DTensor grad(const MeshParameter& parameter) const;

  /// "unbound", "idle", "accumulating 1/2", "reducing", "ready"; "local" if there is no bucket.
  std::string state_text() const;
  /// The buckets, in the order in which they are launched.
  std::vector<BucketInfo> buckets() const;
  /// A table of the buckets, for logs.
  std::string describe() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
