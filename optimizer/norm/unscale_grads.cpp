#include "lockstep/optimizer/unscale_grads.h"

#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/distributed/notify_on_error.h"
#include "lockstep/distributed/parameter_check.h"
#include "lockstep/optimizer/counted_grads.h"

namespace lockstep {
namespace {

/// 1 if a piece has an element that is not finite before or after scaling, else 0.
at::Tensor scale_and_look(const std::vector<at::Tensor>& pieces, double factor,
                          c10::Device device) {
  at::Tensor total = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
  for (const at::Tensor& piece : pieces)
    for (const at::Tensor& part : cache_sized_parts(piece)) {
      if (factor != 1) part.mul_(factor);
      total += finite_mark(part);
    }
  return total.isfinite().logical_not().to(at::kDouble);
}

}  // namespace

bool found_inf(const std::vector<DistributedDataParallel*>& models, double inverse_scale) {
  const at::NoGradGuard no_grad;
  check_model_list(models, "found_inf");
  const PieceClasses classes = notify_on_error(models.front()->parallel_state(), [&] {
    require<UsageError>(std::isfinite(inverse_scale) && inverse_scale > 0,
                        "found_inf: inverse_scale: found {}, allowed: > 0", inverse_scale);
    return held_grads(models, "found_inf");
  });
  const c10::Device device = models.front()->parallel_state().device();
  std::vector<at::Tensor> of_class;
  for (const std::vector<at::Tensor>& pieces : classes)
    of_class.push_back(scale_and_look(pieces, inverse_scale, device));
  return combine_over_model(models, of_class, ReduceOp::max, "gradients that are not finite")
             .item<double>() != 0;
}

}  // namespace lockstep
