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
    if (start < end) pieces.push_back(buffer.held_grads({start, end}));
  }
  return pieces;
}

/// CUDA's multi-tensor kernel has no bf16.
void scale_bf16(const at::Tensor& part, const at::Tensor& factor) {
  constexpr int64_t kChunk = int64_t{1} << 24;  // elements that are fp32 at a time
  for (int64_t start = 0; start < part.numel(); start += kChunk) {
    const at::Tensor chunk = part.slice(0, start, std::min(start + kChunk, part.numel()));
    chunk.copy_(chunk.to(at::kFloat).mul_(factor));
  }
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
  if (!factor.is_cpu() && narrow.front().scalar_type() == at::kBFloat16) {
    for (const at::Tensor& part : narrow) scale_bf16(part, factor);
    return;
  }
  at::Tensor unused = at::zeros({1}, factor.options());  // whether any was not finite
  at::_amp_foreach_non_finite_check_and_unscale_(narrow, unused, factor);
}

}  // namespace lockstep
