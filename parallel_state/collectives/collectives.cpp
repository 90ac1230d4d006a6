#include "lockstep/parallel_state/collectives.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_call.h"

namespace lockstep {
namespace {

using Call = CollectiveCall;
using Kind = CollectiveOperation::Kind;
using Tensors = std::vector<at::Tensor>;

void scale(const Tensors& tensors, const Reduction& reduction) {
  for (const at::Tensor& tensor : tensors) scale_terms(tensor, reduction);
}

CollectiveOperation reducing(Kind kind, const Reduction& reduction) {
  return {.kind = kind,
          .reduction = reduction.op,
          .numerator = reduction.numerator,
          .denominator = reduction.denominator};
}

bool is_sum(ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::average; }

void check_reduction(const Call& call, const Reduction& reduction, const at::Tensor& example) {
  const at::ScalarType dtype = example.scalar_type();
  call.check(reduction.op != ReduceOp::average || at::isFloatingType(dtype),
             "found an average of {}, allowed: floating-point tensors", at::toString(dtype));
  call.check(!example.is_cpu() || reducible_on_cpu(dtype), "found {}, allowed on the CPU: {}",
             at::toString(dtype), kReducibleTypes);
  call.check(reduction.denominator != 0 &&
                 (!reduction.scales() || (is_sum(reduction.op) && at::isFloatingType(dtype))),
             "found the factor {}/{} with {} of {}, allowed: 1, or a floating-point sum or average",
             reduction.numerator, reduction.denominator, to_string(reduction.op),
             at::toString(dtype));
}

Work copy_alone(const Tensors& outputs, const Tensors& inputs) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].const_data_ptr() != inputs[i].const_data_ptr())
      outputs[i].view(-1).copy_(inputs[i].view(-1));
  return Work();
}

}  // namespace

Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, const Reduction& reduction,
                std::string_view label) {
  return all_reduce(group, Tensors{tensor}, reduction, label);
}

Work all_reduce(const ProcessGroup& group, const Tensors& tensors, const Reduction& reduction,
                std::string_view label) {
  Call call(group, reducing(Kind::all_reduce, reduction), label);
  call.check_tensors(tensors);
  check_reduction(call, reduction, tensors[0]);
  if (call.alone()) return scale(tensors, reduction), Work();
  call.note(tensors);
  return call.start(tensors[0], [&](Transport& transport) {
    return transport.all_reduce(tensors, reduction, call.identity());
  });
}

Work reduce_scatter(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                    const Reduction& reduction, std::string_view label) {
  return reduce_scatter(group, Tensors{output}, Tensors{input}, reduction, label);
}

Work reduce_scatter(const ProcessGroup& group, const Tensors& outputs, const Tensors& inputs,
                    const Reduction& reduction, std::string_view label) {
  Call call(group, reducing(Kind::reduce_scatter, reduction), label);
  call.check_sizes(outputs, 1, inputs, group.size());
  check_reduction(call, reduction, inputs[0]);
  if (call.alone()) {
    (void)copy_alone(outputs, inputs);
    return scale(outputs, reduction), Work();
  }
  call.note(inputs);
  return call.start(inputs[0], [&](Transport& transport) {
    return transport.reduce_scatter(outputs, inputs, reduction, call.identity());
  });
}

Work all_gather(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label) {
  return all_gather(group, Tensors{output}, Tensors{input}, label);
}

Work all_gather(const ProcessGroup& group, const Tensors& outputs, const Tensors& inputs,
                std::string_view label) {
  Call call(group, {Kind::all_gather}, label);
  call.check_sizes(outputs, group.size(), inputs, 1);
  if (call.alone()) return copy_alone(outputs, inputs);
  call.note(inputs);
  return call.start(inputs[0], [&](Transport& transport) {
    return transport.all_gather(outputs, inputs, call.identity());
  });
}

Work all_to_all(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label) {
  const auto rows = [&](const at::Tensor& tensor) {
    const int64_t all = tensor.dim() > 0 ? tensor.size(0) : 0;
    if (all % group.size() != 0 || tensor.dim() == 0)
      fail<UsageError>("all_to_all of {} over group {}: found {} rows, allowed: a multiple of {}",
                       label, group.to_string(), all, group.size());
    return std::vector<int64_t>(static_cast<size_t>(group.size()), all / group.size());
  };
  return all_to_all(group, output, input, rows(output), rows(input), label);
}

Work all_to_all(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                const std::vector<int64_t>& output_rows, const std::vector<int64_t>& input_rows,
                std::string_view label) {
  Call call(group, {Kind::all_to_all}, label);
  call.check_tensors({output, input});
  const auto fits = [&](const at::Tensor& tensor, const std::vector<int64_t>& rows) {
    return tensor.dim() > 0 && static_cast<int64_t>(rows.size()) == group.size() &&
           std::all_of(rows.begin(), rows.end(), [](int64_t n) { return n >= 0; }) &&
           std::accumulate(rows.begin(), rows.end(), int64_t{0}) == tensor.size(0);
  };
  call.check(fits(output, output_rows) && fits(input, input_rows),
             "found output rows {} of {} and input rows {} of {}, allowed: one number a rank, "
             "adding up to dimension 0",
             output_rows, output.sizes(), input_rows, input.sizes());
  const auto own = static_cast<size_t>(group.rank());
  const int64_t expected = output_rows[own] * bytes_of_row(output);
  const int64_t found = input_rows[own] * bytes_of_row(input);
  call.check(expected == found,
             "this rank has {} bytes for itself, and {} are expected, allowed: the same; output "
             "rows {} of {}, input rows {} of {}",
             found, expected, output_rows, output.sizes(), input_rows, input.sizes());
  if (call.alone()) return copy_alone({output}, {input});
  call.note({input});
  return call.start(input, [&](Transport& transport) {
    return transport.all_to_all(output, input, output_rows, input_rows, call.identity());
  });
}

Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
               std::string_view label) {
  return broadcast(group, Tensors{tensor}, source, label);
}

Work broadcast(const ProcessGroup& group, const Tensors& tensors, int64_t source,
               std::string_view label) {
  Call call(group, {.kind = Kind::broadcast, .position = source}, label);
  call.check_tensors(tensors);
  call.check_position(source);
  if (call.alone()) return Work();
  call.note(tensors);
  return call.start(tensors[0], [&](Transport& transport) {
    return transport.broadcast(tensors, static_cast<int>(source), call.identity());
  });
}

}  // namespace lockstep
