#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/gradient_scaling.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// Stage 3 of the gradient's way: a range of a gradient buffer that is reduced by one collective.
struct Bucket {
  /// A part that is scaled by itself: a large gradient, or what lies between two of them.
  struct Piece {
    at::Tensor grads;
    bool scaled = false;  ///< in this step
  };

  at::Tensor grads;                     ///< view of the gradient buffer [numel]
  std::vector<std::string> parameters;  ///< names, in buffer order
  std::vector<Piece> pieces;            ///< views that cover `grads`

  int64_t bytes() const { return static_cast<int64_t>(grads.nbytes()); }
};

/// Buckets that are launched together because they get ready together: one bucket where
/// communication overlaps backward, all buckets of a process group where it does not. The unit that
/// GradSyncState counts.
class BucketGroup {
 public:
  /// `label` names the group in errors. `factor` multiplies the gradients before the collective.
  BucketGroup(std::string label, std::vector<Bucket> buckets, ProcessGroup group,
              ScalingFactor factor, ReduceOp op);

  /// Scales a piece before its bucket is started. A large gradient that autograd has just completed
  /// is still in the cache then, which saves a pass over memory.
  void scale_early(size_t bucket, size_t piece);

  /// Scales the pieces that are not scaled yet and starts one all-reduce per bucket.
  void start();

  /// Forgets what was scaled, for a new step.
  void reset();

  /// Returns when the reductions of start() are done (on CUDA: makes the current stream wait).
  void finish();

  const std::string& label() const { return label_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const ProcessGroup& group() const { return group_; }
  ReduceOp op() const { return op_; }

 private:
  void scale(Bucket::Piece& piece) const;

  std::string label_;
  std::vector<Bucket> buckets_;
  ProcessGroup group_;
  ScalingFactor factor_;
  ReduceOp op_;
  std::vector<Work> works_;
};

}  // namespace lockstep
