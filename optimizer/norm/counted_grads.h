#pragma once

// Internal: which gradients a rank counts in a number that describes the whole model, and how the
// ranks combine their parts of it.

#include <vector>

#include <ATen/core/Tensor.h>

#include "lockstep/distributed/distributed_data_parallel.h"
#include "lockstep/optimizer/norms.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {

/// How to treat the gaps between parameters, whose gradients are zero.
enum class Gaps {
  included,  ///< if that saves a piece
  excluded,
  excluded_with_padding,  ///< likewise the rows of padding (ParamDescription::unpadded_rows)
};

/// The places of the gradients that a rank holds and counts. Over the ranks, each element of the
/// model is counted once. With the distributed optimizer a rank holds its shard. Of the ranks that
/// hold the same gradients, the first one counts: tp for dense parameters that are replicated
/// there, etp and ep for experts, the first stage for parameters that every stage holds, and the
/// first copy on the first stage for tied parameters.
class CountedRanges {
 public:
  /// For the parameters that are `chosen`, in the order of the models, of their buffers and of the
  /// parameters in a buffer; for all if it is empty. With
  /// Gaps::excluded_with_padding the call is collective, as piece_places() is.
  /// UsageError naming `caller`: no model, models with and without the distributed optimizer
  /// together. The models must outlive this object.
  CountedRanges(const std::vector<DistributedDataParallel*>& models, Gaps gaps, const char* caller,
                const std::vector<bool>& chosen = {});

  /// Flat views, none of them empty, in the classes that combine_over_model() combines. UsageError
  /// naming `caller`: gradients that are not final.
  PieceClasses grads(const char* caller) const;

  /// The gradients that are counted by another rank, or by another copy on this one. After grads().
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

/// The zeros in these gradients; see count_zeros() in clip_grads.h.
at::Tensor count_zeros(const CountedRanges& counted);

/// Combines the number that each rank has for each class of its gradients (0-dim, on the models'
/// device) into one of the whole model, which has the same bits on all ranks. Instead of one number
/// it may be a flat tensor of several, the same number of them on all ranks. `op`: sum or max.
/// Every rank calls it, whichever parameters it has. There is one class, and one all-reduce over
/// the ranks that share the model, intra-optimizer with the distributed optimizer, otherwise tp-pp;
/// none if that is one rank. Without the distributed optimizer, if tp-ep-pp has other ranks than
/// tp-pp, the experts are a second class, with an all-reduce over tp-ep-pp.
at::Tensor combine_over_model(const std::vector<DistributedDataParallel*>& models,
                              const std::vector<at::Tensor>& of_class, ReduceOp op,
                              const char* label);

/// The sum of the squares of a flat tensor (0-dim, fp64, on its device), or for a complex one, of
/// its absolute values.
at::Tensor sum_of_squares(const at::Tensor& flat);

/// A finite number if all elements of a flat tensor are finite, NaN or infinity if not (0-dim,
/// fp64, on its device).
at::Tensor finite_mark(const at::Tensor& flat);

/// `flat` in parts that fit the cache on the CPU; in one part on other devices.
std::vector<at::Tensor> cache_sized_parts(const at::Tensor& flat);

}  // namespace lockstep
