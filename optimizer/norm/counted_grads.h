#pragma once

// Internal: which gradients a rank counts in a number that describes the whole model, and how the
// ranks put their parts of it together.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/optimizer/norms.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// What to do with the padding between parameters, which is zero.
enum class Gaps {
  included,  ///< where it saves a piece
  excluded,
};

/// Where the gradients lie that a rank holds and counts, so that over the ranks each element of the
/// model is counted once. With the distributed optimizer a rank holds its shard. Of ranks that hold
/// the same the first one counts: tp for dense parameters that are replicated there, etp and ep for
/// experts, the first stage (and there the first model chunk) for tied parameters and for those
/// that every stage holds.
class CountedRanges {
 public:
  /// Of the parameters that are `chosen`, in the order of the models, of their buffers and of the
  /// parameters in a buffer; of all if it is empty. UsageError naming `caller`: no model, models
  /// with and without the distributed optimizer together. The models must outlive this object.
  CountedRanges(const std::vector<DistributedDataParallel*>& models, Gaps gaps, const char* caller,
                const std::vector<bool>& chosen = {});

  /// Flat views, none of them empty, in the classes that combine_over_model() puts together.
  /// UsageError naming `caller`: gradients that are not final.
  PieceClasses grads(const char* caller) const;

  /// The gradients of which another rank, or another copy on this one, counts the same. After
  /// grads().
  PieceClasses grads_counted_elsewhere() const;

  const std::vector<DistributedDataParallel*>& models() const { return models_; }

 private:
  struct Place {
    const ParamAndGradBuffer* buffer;
    ElementRange range;
  };
  std::vector<DistributedDataParallel*> models_;
  using PlaceClasses = std::vector<std::vector<Place>>;
  static PieceClasses grads_of(const PlaceClasses& classes);

  PlaceClasses classes_, elsewhere_;
};

/// All gradients that this rank holds, counted elsewhere or not, in the same classes. Errors as
/// above.
PieceClasses held_grads(const std::vector<DistributedDataParallel*>& models, const char* caller);

/// grad_norm() of models whose gradients have been looked up before.
at::Tensor grad_norm(const CountedRanges& counted, double norm_type = 2);

/// Combines the number that each rank has of each class of its gradients (0-dim, on the models'
/// device) into one of the whole model, which has the same bits on all ranks. Instead of one number
/// it may be a flat tensor of several, on all ranks as many. `op`: sum or max.
/// Every rank calls it, whichever parameters it has. There is one class, and one all-reduce over
/// the ranks that share the model, intra-optimizer with the distributed optimizer, otherwise tp-pp;
/// none where they are one rank. Without the distributed optimizer, and where tp-ep-pp has other
/// ranks than tp-pp, the experts are a second class, with an all-reduce over tp-ep-pp.
at::Tensor combine_over_model(const std::vector<DistributedDataParallel*>& models,
                              const std::vector<at::Tensor>& of_class, ReduceOp op,
                              const char* label);

/// The sum of the squares of a flat tensor (0-dim, fp64, on its device), of a complex one of its
/// absolute values.
at::Tensor sum_of_squares(const at::Tensor& flat);

/// A finite number if all elements of a flat tensor are finite, NaN or infinity if not (0-dim,
/// fp64, on its device).
at::Tensor finite_mark(const at::Tensor& flat);

/// `flat` in parts that fit the cache on the CPU; in one on other devices.
std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat);

}  // namespace lockstep
