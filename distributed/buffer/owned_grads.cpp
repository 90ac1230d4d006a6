#include "lockstep/distributed/owned_grads.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/narrow_dtype.h"

namespace lockstep {

namespace {

std::vector<at::Tensor> common_parts(const ParamAndGradBuffer& buffer,
                                     const std::vector<ElementRange>& ranges, ElementRange range) {
  std::vector<at::Tensor> pieces;
  for (const ElementRange& held : ranges) {
    const int64_t start = std::max(held.start, range.start);
    const int64_t end = std::min(held.end, range.end);
    if (start < end) pieces.push_back(buffer.grad_data().slice(0, start, end));
  }
  return pieces;
}

}  // namespace

std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer, ElementRange range) {
  return common_parts(buffer, buffer.owned(), range);
}

std::vector<at::Tensor> reduced_grads(const ParamAndGradBuffer& buffer, ElementRange range) {
  return common_parts(buffer, buffer.reduced(), range);
}

std::vector<at::Tensor> reduced_grads(const ParamAndGradBuffer& buffer) {
  return reduced_grads(buffer, {0, buffer.layout().numel});
}

std::vector<at::Tensor> owned_grads(const ParamAndGradBuffer& buffer) {
  return owned_grads(buffer, {0, buffer.layout().numel});
}

void divide_grads(const std::vector<at::Tensor>& grads, const at::Tensor& divisor) {
  std::vector<at::Tensor> narrow;
  for (const at::Tensor& part : grads)
    if (is_narrow(part.scalar_type()))
      narrow.push_back(part);
    else
      part.div_(divisor);
  if (narrow.empty()) return;
  const at::Tensor factor = divisor.reciprocal().to(at::kFloat);
  at::Tensor unused = at::zeros({1}, factor.options());  // whether any was not finite
  at::_amp_foreach_non_finite_check_and_unscale_(narrow, unused, factor);
}

}  // namespace lockstep
