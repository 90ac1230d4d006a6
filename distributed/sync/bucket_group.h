#pragma once

// Internal.

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/bucket_info.h"
#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/distributed/param_and_grad_buffer.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Stage 3 of a gradient's path: a range of a buffer that is reduced by one collective.
struct Bucket {
  at::Tensor grads;                          ///< view of the gradient buffer [numel]
  std::vector<std::string> parameters = {};  ///< names, in buffer order
  std::vector<at::Tensor> grad_views = {};   ///< of `parameters`

  /// With the distributed optimizer, the part of `grads` that this rank owns [numel / ranks];
  /// otherwise undefined.
  at::Tensor grad_shard = {};

  /// The owner of `grads`, if the memory of `grads` exists only from the first gradient to the end
  /// of the reduction (ParamAndGradBuffer::lends_grads); otherwise null.
  ParamAndGradBuffer* lender = nullptr;

  int64_t bytes() const { return static_cast<int64_t>(grads.nbytes()); }
};

/// How gradients are reduced, and over which ranks.
struct GradReduction {
  /// All data-parallel ranks; with the distributed optimizer, those among which buckets are cut.
  ProcessGroup group;
  /// With several optimizer instances, the ranks that own the same shard.
  std::optional<ProcessGroup> instances = {};
  /// Multiplies the gradients before they are combined.
  ScalingFactor factor = {};
  ReduceOp op = ReduceOp::sum;
  /// Instead of a reduce-scatter, bf16 and fp16 gradients are exchanged as they are, and each rank
  /// adds the terms of its shard in fp32. Needs `sum`, and no `instances`.
  bool accumulate_in_fp32 = false;
};

/// The checks of this rank's gradients before they are reduced.
struct GradChecks {
  GradChecks(bool nan_or_infinite = false, std::optional<double> larger_than = {})
      : nan(nan_or_infinite), large(larger_than) {}
  bool nan;                     ///< also infinite ones
  std::optional<double> large;  ///< absolute values above it
};

/// Buckets that are launched together because they become ready together: one bucket if
/// communication overlaps backward, otherwise all buckets of a process group. The unit that
/// GradSyncState counts.
class BucketGroup {
 public:
  /// `label` names the group in errors. `checks`: what start() looks for first.
  BucketGroup(std::string label, std::vector<Bucket> buckets, GradReduction reduction,
              GradChecks checks);

  /// Starts the reduction of each bucket, which also scales: an all-reduce, or a reduce-scatter
  /// into the bucket's shard, in place. If the checks find something in a gradient, throws
  /// UsageError before anything is sent, naming bucket and parameter.
  void start();

  /// The same with NaN in place of the gradients, unchecked, so that whoever uses the reduced
  /// gradients notices.
  void start_with_nan();

  /// With several optimizer instances: waits for the reduce-scatters and starts the all-reduces of
  /// the shards over the instances. Call it for all groups before finish().
  void continue_over_instances();

  /// Returns when the reductions of start() are done (on CUDA: makes the current stream wait), and
  /// frees what a lender has lent.
  void finish();

  /// Sets the factor of the reductions that start from now on.
  void set_factor(ScalingFactor factor) { reduction_.factor = factor; }
  /// Uses all-reduces from now on, also where buckets are cut: every rank gets all reduced
  /// gradients.
  void set_force_all_reduce(bool on) { force_all_reduce_ = on; }

  /// Whether `bucket` is reduced into this rank's shard.
  bool reduces_shards(const Bucket& bucket) const {
    return bucket.grad_shard.defined() && !force_all_reduce_;
  }

  const std::string& label() const { return label_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const GradReduction& reduction() const { return reduction_; }

 private:
  void launch();
  void complete_lent();
  void free_lent();
  void start_exchange(const Bucket& bucket);
  void add_exchanged();

  /// The terms of a shard from all ranks [ranks, shard's elements].
  struct Exchange {
    at::Tensor terms;
    at::Tensor shard;
  };

  std::string label_;
  std::vector<Bucket> buckets_;
  GradReduction reduction_;
  GradChecks checks_;
  bool force_all_reduce_ = false;
  bool lent_ = false;  ///< from launch() on
  std::vector<Work> works_;
  std::vector<Exchange> exchanges_;
};

/// How `group` reduces `bucket`, which is one of its own.
BucketReduction reduction_of(const BucketGroup& group, const Bucket& bucket);
BucketInfo info_of(const BucketGroup& group, const Bucket& bucket);

}  // namespace lockstep
