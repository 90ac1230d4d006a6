#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Stage 3 of the gradient's way: a range of a gradient buffer that is reduced by one collective.
struct Bucket {
  at::Tensor grads;                     ///< view of the gradient buffer [numel]
  std::vector<std::string> parameters;  ///< names, in buffer order

  int64_t bytes() const { return static_cast<int64_t>(grads.nbytes()); }
};

/// Buckets that are launched together because they get ready together: one bucket where
/// communication overlaps backward, all buckets of a process group where it does not. The unit that
/// GradSyncState counts.
class BucketGroup {
 public:
  /// `label` names the group in errors. `factor` multiplies the gradients
  /// before they are combined.
  BucketGroup(std::string label, std::vector<Bucket> buckets, ProcessGroup group,
              ScalingFactor factor, ReduceOp op);

  /// Starts one all-reduce per bucket, which also scales.
  void start();

  /// Returns when the reductions of start() are done (on CUDA: makes the current stream wait).
  void finish();

  const std::string& label() const { return label_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const ProcessGroup& group() const { return group_; }
  ReduceOp op() const { return reduction_.op; }

 private:
  std::string label_;
  std::vector<Bucket> buckets_;
  ProcessGroup group_;
  Reduction reduction_;
  std::vector<Work> works_;
};

}  // namespace lockstep
