#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "lockstep/core/parameters.h"
#include "lockstep/distributed/bucket_info.h"
#include "lockstep/distributed/comm_hooks.h"
#include "lockstep/distributed/no_sync.h"
#include "lockstep/distributed/reducer_logging.h"
#include "lockstep/parallel_state/parallel_state.h"
#include "lockstep/parallel_state/process_group.h"

namespace lockstep {

/// Options of a Reducer; the same on all ranks.
struct ReducerOptions {
  /// Bytes at which a bucket is closed: the first bucket, the second, ...; the last number applies
  /// to all further buckets. Buckets are filled in the order in which gradients became ready in the
  /// first iteration, so the small bucket is reduced first.
  std::vector<int64_t> bucket_bytes_caps = {1 << 20, 25 << 20};
  /// The same for the first iteration, in which buckets are filled in the order of registration and
  /// reduced in reverse. Empty: bucket_bytes_caps.
  std::vector<int64_t> initial_bucket_bytes_caps = {};
  /// Instead of initial_bucket_bytes_caps: the buckets of the first iteration, in the order in
  /// which they are reduced, as positions among the trained parameters.
  std::vector<std::vector<size_t>> bucket_indices = {};
  /// Whether buckets are rebuilt before the second iteration. Never with find_unused_parameters,
  /// unless the graph is static.
  bool rebuild_buckets = true;
  /// Parameters may lack a gradient, and which ones do may differ between ranks and between
  /// iterations. A parameter counts as used if a backward on any rank has given it a gradient since
  /// the previous reduction, inside no_sync() too. An unused parameter keeps its previous gradient.
  /// An iteration ends with its first backward, so outputs that have backwards of their own cannot
  /// share one. Costs a traversal of the graph and an all-reduce of 4 bytes per parameter in each
  /// iteration.
  bool find_unused_parameters = false;
  /// With find_unused_parameters: buckets whose parameters no rank has used are not reduced. The
  /// ranks agree on them in prepare_for_backward(), which costs one more all-reduce.
  bool skip_all_reduce_unused_params = false;
  /// Promises that every iteration gives each parameter its gradient as often as the first
  /// iteration of the rank did. Supports what the traversal of the graph cannot see: recomputation
  /// that runs its own backward, parameters used in several such backwards, parameters that are
  /// never used. The first iteration does not overlap, and ends with its first backward, as every
  /// one does with find_unused_parameters. The set of parameters that some rank uses is fixed at
  /// the end of the first one that is reduced, including backwards inside no_sync().
  bool static_graph = false;
  /// Gradients become views of the buckets after their first reduction; otherwise they are copied
  /// to and from the buckets.
  bool gradient_as_bucket_view = true;
  /// Names of parameters with sparse gradients (embeddings with sparse = true). Each is reduced
  /// alone. On the CPU only.
  std::vector<std::string> sparse_parameters = {};
  /// Dtype of the buckets, if not that of the parameters: fp32 sums for bf16 parameters, or the
  /// other way round. With gradient_as_bucket_view it is the dtype of the gradients as well. Sparse
  /// gradients keep the dtype of their parameter.
  std::optional<at::ScalarType> reduce_dtype = {};
  /// Refuses gradients that are NaN or infinite before they are sent. Not with a hook.
  bool check_for_nan_in_grad = false;
  /// All ranks start from the parameters (and module buffers) of the first rank. See
  /// Reducer::broadcast_parameters().
  bool broadcast_parameters = true;
};

/// Options of Reducer::join.
struct ReducerJoinOptions {
  /// Divide by the number of all ranks; otherwise by the number of ranks that still have inputs.
  bool divide_by_initial_world_size = true;
  /// All ranks throw UsageError once the first rank has run out of inputs.
  bool throw_on_early_termination = false;
};

/// Averages the gradients of data-parallel ranks bucket by bucket while backward is still running.
/// An iteration works as with PyTorch's c10d::Reducer, on the buffers and collectives of
/// DistributedDataParallel. Parameters stay where they are. Use it for loops in which the used
/// parameters change from step to step, or with communication hooks, sparse gradients or uneven
/// inputs; otherwise DistributedDataParallel costs less.
///
///     Reducer reducer(model, state.group(GroupKind::dp_cp));
///     for (...) {
///       reducer.zero_grad_buffer();
///       reducer.prepare_for_forward();
///       const at::Tensor loss = model.loss(batch);
///       reducer.prepare_for_backward({loss});
///       loss.backward();                       // gradients are averaged when it returns
///       optimizer.step();
///     }
///
/// Several forwards may come before their backwards, except inside join(): each backward that was
/// prepared is reduced, with find_unused_parameters also one that reaches no parameter. A prepared
/// backward may be left out on all ranks, or run only as part of another one; it is forgotten once
/// the graphs of its outputs are destroyed. A backward that was not prepared throws, unless it runs
/// inside no_sync(). A gradient that is accumulated onto an averaged one is averaged correctly.
///
/// Without find_unused_parameters, a backward that misses parameters leaves the iteration open,
/// because the next one may bring them; finalize_backward(), or else the next
/// prepare_for_forward(), throws UsageError with their names, and the other ranks raise
/// CommunicationError instead of waiting.
///
/// There is no way to abandon an iteration, as abandon_step() of the other fronts does. If an
/// operator throws in the middle of backward, this object cannot be used again, and on several
/// ranks the job cannot go on unless all of them stopped between the same two buckets and make a
/// new Reducer.
class Reducer {
 public:
  /// Reduces the gradients of the parameters that require one over `group`, all of whose ranks must
  /// make this call. The ranks compare their parameters and options. If these differ, every rank
  /// throws CommunicationError with the first difference; of registered buffers they compare names,
  /// shapes and dtypes. UsageError: no parameter is trained, an undefined tensor, a parameter or a
  /// name that is listed twice, a parameter that is already being reduced, or buckets that do not
  /// hold each parameter once. ConfigError: options that cannot be combined. If only some ranks
  /// find such an error, the others throw CommunicationError. Parameters that are registered with
  /// the module later are not reduced. Embeddings of `module` with sparse gradients join
  /// sparse_parameters.
  ///
  /// A group alone does not determine which other reductions a description requires. So a gradient
  /// in `module` that is declared partial over an axis other than dp and cp is a UsageError, naming
  /// the parameter, and so are experts and tied parameters.
  Reducer(const torch::nn::Module& module, const ProcessGroup& group, ReducerOptions options = {});
  /// Over the dp-cp group of `state`, for a module that describes its parameters. UsageError,
  /// naming the parameter, if its layer was made for other numbers of ranks
  /// (NamedParameter::cut_by) or a mean over dp-cp would be wrong: a gradient that is partial over
  /// another axis of several ranks, an expert that is replicated over other ranks, a tie with
  /// several pipeline stages. CommunicationError, naming the parameter, for one that some ranks of
  /// tp, dp and cp train and others have frozen.
  Reducer(const torch::nn::Module& module, const ParallelState& state, ReducerOptions options = {});
  /// The same for a list of parameters; `group` as above. Nothing is known of module buffers.
  Reducer(std::vector<NamedParameter> parameters, const ProcessGroup& group,
          const ReducerOptions& options = {});
  /// Removes the hooks.
  ~Reducer();
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;

  /// Call it before the forward of every iteration that is reduced. Throws if the previous
  /// iteration is still open, or if a parameter that was frozen requires a gradient now: nobody
  /// would reduce it, so make a new Reducer. Before the second iteration all ranks agree on new
  /// buckets. Does nothing inside no_sync().
  void prepare_for_forward();
  /// Call it after the forward and before its backward. `outputs`: all tensors from which backward
  /// will start, or from which the loss is computed. They must be part of the loss's graph, also
  /// without find_unused_parameters: if all that have a graph were only computed for logging and
  /// are dropped, the next call forgets this backward before it runs. find_unused_parameters needs
  /// them; without them (empty) it finds unused parameters only when backward has ended, and not at
  /// all if it reaches no parameter. UsageError with find_unused_parameters for outputs without a
  /// graph before the other prepared backwards have run. Does nothing inside no_sync().
  void prepare_for_backward(const std::vector<at::Tensor>& outputs = {});
  /// Throws if the iteration is open, with the names of the parameters whose gradients are missing.
  /// Also throws if a backward is prepared, but none has reached any parameter since the last call
  /// or the last forward, unless this is called inside no_sync(). Backward itself finishes the
  /// iteration when all gradients have arrived.
  void finalize_backward();

  /// While the guard exists, gradients are accumulated and nothing is reduced. Guards can be
  /// nested.
  using NoSyncGuard = lockstep::NoSyncGuard;
  [[nodiscard]] NoSyncGuard no_sync();

  /// Sets existing gradients to zero, bucket by bucket.
  void zero_grad_buffer();
  /// The same, under the name that all fronts share.
  void zero_grad() { zero_grad_buffer(); }

  /// From now on `hook` combines the buckets. Call it at most once, between iterations; otherwise
  /// UsageError. The hooks of all ranks must have the same CommHook::identity(). The first
  /// prepare_for_forward() compares them, with 8 bytes per rank, and throws CommunicationError on
  /// every rank if they differ or if some ranks have no hook. After that, all ranks must register
  /// together, and this call compares.
  void register_comm_hook(std::shared_ptr<CommHook> hook);

  /// For the next iteration, gives the rows (sorted, distinct) in which the gradient of a sparse
  /// parameter has entries on any rank, by parameter name. They must be the same on all ranks. Then
  /// only these rows are sent, in one all-reduce. If the rows differ between ranks, the all-reduces
  /// do not match and fail at the timeout.
  void set_sparse_metadata(std::map<std::string, at::Tensor> rows);

  /// Runs `iterations`; some ranks may run fewer than others. A rank that has finished adds zeros
  /// to the reductions of the others until all have finished. Then all ranks get the parameters of
  /// the last rank among those that ran the most iterations. The gradients of a waiting rank have
  /// no meaning. Nothing but this Reducer may communicate inside, and prepare_for_forward() must be
  /// inside no_sync() if its backward is. UsageError unless each forward outside no_sync() has its
  /// backward before the next one and before `iterations` returns; the other ranks throw
  /// CommunicationError. If the ranks pass different options, every rank throws CommunicationError.
  void join(const std::function<void()>& iterations, const ReducerJoinOptions& options = {});

  /// Gives all ranks the parameters, frozen ones included, and the registered module buffers of the
  /// rank at position `source`. A Reducer over a ParallelState leaves out frozen experts of which
  /// other ranks of dp-cp have none, and the buffers of modules all of whose parameters are such
  /// experts.
  void broadcast_parameters(int64_t source = 0);

  /// Positions among the trained parameters, in the order in which buckets are reduced.
  const std::vector<std::vector<size_t>>& bucket_indices() const;
  std::vector<BucketInfo> buckets() const;
  bool has_rebuilt_buckets() const;
  /// The number of ranks on which each trained parameter was used in the last iteration. Available
  /// with find_unused_parameters; with static_graph, the counts of the first iteration.
  const std::vector<int32_t>& used_counts() const;
  /// Whether this rank has left the same parameters unused in all iterations so far.
  bool ddp_graph_static() const;

  /// Times are taken in the first ten iterations and in every `rate`-th. ConfigError if `rate` is
  /// below 1.
  void set_ddp_runtime_logging_sample_rate(int64_t rate);
  /// When each trained parameter got its gradient in the last sampled iteration, ns since backward
  /// began.
  const std::vector<int64_t>& get_backward_stats() const;
  ReducerLoggingData logging_data() const;
  /// A table of the buckets, for logs.
  std::string describe() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lockstep
