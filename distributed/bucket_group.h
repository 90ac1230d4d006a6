#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Stage 3 of the gradient's way: a range of a buffer that is reduced by one collective.
struct Bucket {
  at::Tensor grads;                     ///< view of the gradient buffer [numel]
  std::vector<std::string> parameters;  ///< names, in buffer order
  std::vector<at::Tensor> grad_views;   ///< of `parameters`

  /// With the distributed optimizer, the part of `grads` that this rank owns [numel / ranks];
  /// otherwise undefined.
  at::Tensor grad_shard = {};

  int64_t bytes() const { return static_cast<int64_t>(grads.nbytes()); }
};

/// Over which ranks gradients are reduced, and how.
struct GradReduction {
  /// All data-parallel ranks; with the distributed optimizer, those among which buckets are cut.
  ProcessGroup group;
  /// With several optimizer instances, the ranks that own the same shard.
  std::optional<ProcessGroup> instances = {};
  /// Multiplies the gradients before they are combined.
  ScalingFactor factor = {};
  ReduceOp op = ReduceOp::sum;
};

/// Buckets that are launched together because they get ready together: one bucket where
/// communication overlaps backward, all buckets of a process group where it does not. The unit that
/// GradSyncState counts.
class BucketGroup {
 public:
  /// `label` names the group in errors. `check_for_nan`: start() looks at the gradients first.
  BucketGroup(std::string label, std::vector<Bucket> buckets, GradReduction reduction,
              bool check_for_nan);

  /// Starts the reduction of each bucket, which also scales: an all-reduce, or a reduce-scatter
  /// into the bucket's shard, in place. UsageError, before anything is sent, names bucket and
  /// parameter of a gradient that check_for_nan finds.
  void start();

  /// With several optimizer instances: waits for the reduce-scatters and starts the all-reduces of
  /// the shards over the instances. To be called for all groups before finish().
  void continue_over_instances();

  /// Returns when the reductions of start() are done (on CUDA: makes the current stream wait).
  void finish();

  const std::string& label() const { return label_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const GradReduction& reduction() const { return reduction_; }

 private:
  void wait();

  std::string label_;
  std::vector<Bucket> buckets_;
  GradReduction reduction_;
  bool check_for_nan_;
  std::vector<Work> works_;
};

}  // namespace lockstep
