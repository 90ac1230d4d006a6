#pragma once

// Internal: what finalize_model_grads and the optimizer ask of a DistributedDataParallel.

#include <vector>

#include "lockstep/distributed/distributed_data_parallel.h"

namespace lockstep::detail {

struct StepAccess {
  /// finish_grad_sync() unless the step is reduced already. Returns how the buckets were reduced.
  /// UsageError if the step was finalized already, or if a gradient was replaced since it was
  /// reduced.
  static std::vector<BucketReduction> begin_finalize(DistributedDataParallel& model);
  static void end_finalize(DistributedDataParallel& model);

  /// Counts a backward that gave every parameter a gradient and that ran from a recording, on the
  /// device and without the host. Not with ddp.allow_unused_parameters.
  static void note_backward(DistributedDataParallel& model);

  /// Throws UsageError naming `caller` unless the gradients are final: reduced, and made final by
  /// finalize_model_grads if that has more to do (per-token scaling, partial or tied gradients),
  /// and none was replaced since. Looks at every parameter: for once per step.
  static void require_final_gradients(const DistributedDataParallel& model, const char* caller);

  /// With ddp.align_param_gather: waits for the other pipeline stages as the parameter gather of
  /// one model does. All stages must wait equally often, so a rank calls it for each model chunk
  /// that others have and it has not.
  static void align_gather(const DistributedDataParallel& model);
};

}  // namespace lockstep::detail
