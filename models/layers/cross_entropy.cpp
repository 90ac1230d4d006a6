#include "lockstep/models/layers/cross_entropy.h"

#include <ATen/ATen.h>

namespace lockstep {

at::Tensor token_cross_entropy(const at::Tensor& logits, const at::Tensor& labels) {
  const at::Tensor wide = logits.scalar_type() == at::kDouble ? logits : logits.to(at::kFloat);
  return at::cross_entropy_loss(wide, labels, /*weight=*/{}, at::Reduction::None);
}

}  // namespace lockstep
