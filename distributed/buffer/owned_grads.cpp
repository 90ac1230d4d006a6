#include "lockstep/distributed/owned_grads.h"

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/core/upload.h"

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

/// `parts` share a dtype of 16 bits and the factor's device.
void scale_narrow(const std::vector<at::Tensor>& parts, const at::Tensor& factor) {
  if (parts.empty()) return;
  if (!factor.is_cpu() && parts.front().scalar_type() == at::kBFloat16) {
    for (const at::Tensor& part : parts) scale_bf16(part, factor);
    return;
  }
  at::Tensor unused = at::zeros({1}, factor.options());  // whether any was not finite
  at::_amp_foreach_non_finite_check_and_unscale_(parts, unused, factor);
}

/// `grads` share a device with `there`.
void divide_on_device(const std::vector<at::Tensor>& grads, const at::Tensor& there) {
  std::vector<at::Tensor> bf16, fp16;
  for (const at::Tensor& part : grads) {
    if (part.scalar_type() == at::kBFloat16)
      bf16.push_back(part);
    else if (part.scalar_type() == at::kHalf)
      fp16.push_back(part);
    else
      part.div_(there);
  }
  if (bf16.empty() && fp16.empty()) return;
  const at::Tensor factor = there.reciprocal().to(at::kFloat);
  scale_narrow(bf16, factor);
  scale_narrow(fp16, factor);
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

void check_token_count(const at::Tensor& num_tokens, const char* caller) {
  require<UsageError>(num_tokens.defined() && num_tokens.numel() == 1,
                      "{}: num_tokens must have one element", caller);
  if (!num_tokens.is_cpu()) return;  // reading it would stall the device
  const double value = num_tokens.detach().to(at::kDouble).item<double>();
  require<UsageError>(std::isfinite(value) && value >= 0,
                      "{}: num_tokens: found {}, allowed: a count >= 0", caller, value);
}

void divide_grads(const std::vector<at::Tensor>& grads, const at::Tensor& divisor) {
  std::vector<at::Tensor> rest = grads;
  while (!rest.empty()) {
    const c10::Device device = rest.front().device();
    const auto others = std::stable_partition(
        rest.begin(), rest.end(), [&](const at::Tensor& part) { return part.device() == device; });
    divide_on_device({rest.begin(), others},
                     divisor.is_cpu() ? upload(divisor, device) : divisor.to(device));
    rest.erase(rest.begin(), others);
  }
}

}  // namespace lockstep
