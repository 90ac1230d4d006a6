#include "lockstep/optimizer/update_rule.h"

#include <ATen/ATen.h>

#include "lockstep/core/check.h"

namespace lockstep {

UpdateRule::UpdateRule(UpdateStatement statement) : statement_(std::move(statement)) {
  statement_.validate();
}

UpdateRange UpdateRange::part(const kernels::UpdateSegment& segment) const {
  const auto cut = [&](const at::Tensor& tensor) {
    return tensor.defined() ? tensor.slice(0, segment.start, segment.end) : tensor;
  };
  UpdateRange result = {.weights = cut(weights),
                        .grad = cut(grad),
                        .copy = cut(copy),
                        .state = {},
                        .segments = {{0, segment.end - segment.start}},
                        .learning_rate = learning_rate,
                        .weight_decay = weight_decay,
                        .step = step,
                        .control = control,
                        .parameter = parameter};
  for (const at::Tensor& one : state) result.state.push_back(cut(one));
  return result;
}

at::Tensor UpdateRange::gradient() const { return grad.to(weights.scalar_type()) * control[0]; }

void UpdateRange::write(const at::Tensor& target, const at::Tensor& value) const {
  const auto shape = [](const at::Tensor& tensor) {
    return tensor.defined() ? fmt::format("[{}]", fmt::join(tensor.sizes(), ", ")) : "undefined";
  };
  if (!value.defined() || value.sizes() != target.sizes()) [[unlikely]]
    fail<UsageError>(
        "update rule: {}: found a value of shape {}, allowed: {}, that of what it is "
        "written to",
        parameter ? "parameter '" + parameter->name + "'" : "a range of parameters", shape(value),
        shape(target));
  at::Tensor(target).copy_(at::where(control[1].ne(0), value, target));
}

void UpdateRange::write_weights(const at::Tensor& value) const {
  write(weights, value);
  if (copy.defined()) at::Tensor(copy).copy_(weights);
}

}  // namespace lockstep
