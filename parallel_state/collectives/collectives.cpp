#include "lockstep/parallel_state/collectives.h"

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_call.h"
#include "lockstep/parallel_state/host_reduction.h"

namespace lockstep {
namespace {

using Call = CollectiveCall;
using Operation = Work::Operation;
using Tensors = std::vector<at::Tensor>;

c10d::ReduceOp to_c10d(ReduceOp op) {
  switch (op) {
    case ReduceOp::average:
      return c10d::ReduceOp::AVG;
    case ReduceOp::max:
      return c10d::ReduceOp::MAX;
    case ReduceOp::min:
      return c10d::ReduceOp::MIN;
    default:
      return c10d::ReduceOp::SUM;
  }
}

/// start_one(i) -> a part, for i < count; on NCCL they become one launch.
template <class StartOne>
std::vector<Operation::Part> coalesce(c10d::ProcessGroup& c10d, const at::Tensor& example,
                                      size_t count, StartOne start_one) {
  std::vector<Operation::Part> parts;
  const bool together = example.is_cuda() && count > 1;
  if (together) c10d.startCoalescing(c10::kCUDA);
  for (size_t i = 0; i < count; ++i) {
    Operation::Part part = start_one(i);
    if (!together) parts.push_back(std::move(part));
  }
  if (together) parts.emplace_back(c10d.endCoalescing(c10::kCUDA));
  return parts;
}

void scale(const Tensors& tensors, const Reduction& reduction) {
  for (at::Tensor tensor : tensors) {
    if (reduction.numerator != 1) tensor.mul_(reduction.numerator);
    if (reduction.denominator != 1) tensor.div_(reduction.denominator);
  }
}

/// The reduction's operation for c10d. What c10d cannot scale on the way is scaled here.
c10d::ReduceOp prepare_for_c10d(const Tensors& inputs, const Reduction& reduction) {
  if (!reduction.scales()) return to_c10d(reduction.op);
#ifdef USE_C10D_NCCL
  if (inputs[0].is_cuda() && reduction.op == ReduceOp::sum)
    return c10d::makeNCCLPreMulSum(static_cast<double>(reduction.numerator) /
                                   static_cast<double>(reduction.denominator));
#endif
  scale(inputs, reduction);
  return to_c10d(reduction.op);
}

HostReduction host_reduction(const Reduction& reduction, int64_t ranks) {
  HostReduction host;
  host.op = reduction.op == ReduceOp::max   ? HostReduceOp::max
            : reduction.op == ReduceOp::min ? HostReduceOp::min
                                            : HostReduceOp::sum;
  host.multiplier = static_cast<double>(reduction.numerator);
  host.divisor = static_cast<double>(reduction.denominator);
  if (reduction.op == ReduceOp::average) host.result_divisor = static_cast<double>(ranks);
  return host;
}

bool is_sum(ReduceOp op) { return op == ReduceOp::sum || op == ReduceOp::average; }

void check_reduction(const Call& call, const Reduction& reduction, const at::Tensor& example) {
  const at::ScalarType dtype = example.scalar_type();
  call.check(reduction.op != ReduceOp::average || at::isFloatingType(dtype),
             "found an average of {}, allowed: floating-point tensors", at::toString(dtype));
  call.check(!example.is_cpu() || host_type(dtype), "found {}, allowed on the CPU: {}",
             at::toString(dtype), kHostTypes);
  call.check(!reduction.scales() ||
                 (is_sum(reduction.op) && at::isFloatingType(dtype) && reduction.denominator != 0),
             "found the factor {}/{} with {} of {}, allowed: 1, or a floating-point sum or average",
             reduction.numerator, reduction.denominator, to_string(reduction.op),
             at::toString(dtype));
}

std::string name_of(const char* operation, ReduceOp op) {
  return fmt::format("{} ({})", operation, to_string(op));
}

std::vector<int64_t> bytes_of_rows(const at::Tensor& tensor, const std::vector<int64_t>& rows) {
  const int64_t all = tensor.size(0);
  const int64_t row = all == 0 ? 0 : static_cast<int64_t>(tensor.nbytes()) / all;
  std::vector<int64_t> bytes;
  for (const int64_t n : rows) bytes.push_back(n * row);
  return bytes;
}

Work copy_alone(const Tensors& outputs, const Tensors& inputs) {
  for (size_t i = 0; i < outputs.size(); ++i)
    if (outputs[i].const_data_ptr() != inputs[i].const_data_ptr())
      outputs[i].view(-1).copy_(inputs[i].view(-1));
  return Work();
}

}  // namespace

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::sum:
      return "sum";
    case ReduceOp::average:
      return "average";
    case ReduceOp::max:
      return "max";
    case ReduceOp::min:
      return "min";
  }
  return "";
}

Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, const Reduction& reduction,
                std::string_view label) {
  return all_reduce(group, Tensors{tensor}, reduction, label);
}

Work all_reduce(const ProcessGroup& group, const Tensors& tensors, const Reduction& reduction,
                std::string_view label) {
  Call call(group, name_of("all_reduce", reduction.op), label);
  call.check_tensors(tensors);
  check_reduction(call, reduction, tensors[0]);
  if (call.alone()) return scale(tensors, reduction), Work();
  call.note(tensors);
  return call.start(tensors[0], [&](c10d::ProcessGroup& c10d) {
    HostExchange* const exchange = call.exchange(tensors[0]);
    c10d::AllreduceOptions options;
    if (!exchange) options.reduceOp = prepare_for_c10d(tensors, reduction);
    return coalesce(c10d, tensors[0], tensors.size(), [&](size_t i) -> Operation::Part {
      if (exchange)
        return exchange->all_reduce(tensors[i], host_reduction(reduction, group.size()),
                                    call.identity());
      Tensors one = {tensors[i]};
      return c10d.allreduce(one, options);
    });
  });
}

Work reduce_scatter(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                    const Reduction& reduction, std::string_view label) {
  return reduce_scatter(group, Tensors{output}, Tensors{input}, reduction, label);
}

Work reduce_scatter(const ProcessGroup& group, const Tensors& outputs, const Tensors& inputs,
                    const Reduction& reduction, std::string_view label) {
  Call call(group, name_of("reduce_scatter", reduction.op), label);
  call.check_sizes(outputs, 1, inputs, group.size());
  check_reduction(call, reduction, inputs[0]);
  if (call.alone()) {
    (void)copy_alone(outputs, inputs);
    return scale(outputs, reduction), Work();
  }
  call.note(inputs);
  return call.start(inputs[0], [&](c10d::ProcessGroup& c10d) {
    HostExchange* const exchange = call.exchange(inputs[0]);
    c10d::ReduceScatterOptions options;
    if (!exchange) options.reduceOp = prepare_for_c10d(inputs, reduction);
    return coalesce(c10d, inputs[0], inputs.size(), [&](size_t i) -> Operation::Part {
      if (exchange)
        return exchange->reduce_scatter(outputs[i], inputs[i],
                                        host_reduction(reduction, group.size()), call.identity());
      at::Tensor to = outputs[i].view(-1), from = inputs[i].view(-1);
      return c10d._reduce_scatter_base(to, from, options);
    });
  });
}

Work all_gather(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label) {
  return all_gather(group, Tensors{output}, Tensors{input}, label);
}

Work all_gather(const ProcessGroup& group, const Tensors& outputs, const Tensors& inputs,
                std::string_view label) {
  Call call(group, "all_gather", label);
  call.check_sizes(outputs, group.size(), inputs, 1);
  if (call.alone()) return copy_alone(outputs, inputs);
  call.note(inputs);
  return call.start(inputs[0], [&](c10d::ProcessGroup& c10d) {
    HostExchange* const exchange = call.exchange(inputs[0]);
    return coalesce(c10d, inputs[0], inputs.size(), [&](size_t i) -> Operation::Part {
      if (exchange) return exchange->all_gather(outputs[i], inputs[i], call.identity());
      at::Tensor to = outputs[i].view(-1), from = inputs[i].view(-1);
      return c10d._allgather_base(to, from);
    });
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
  Call call(group, "all_to_all", label);
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
  const std::vector<int64_t> output_bytes = bytes_of_rows(output, output_rows);
  const std::vector<int64_t> input_bytes = bytes_of_rows(input, input_rows);
  const auto own = static_cast<size_t>(group.rank());
  call.check(output_bytes[own] == input_bytes[own],
             "this rank has {} bytes for itself, and {} are expected, allowed: the same; output "
             "rows {} of {}, input rows {} of {}",
             input_bytes[own], output_bytes[own], output_rows, output.sizes(), input_rows,
             input.sizes());
  if (call.alone()) return copy_alone({output}, {input});
  call.note({input}, Call::Kind::uneven_collective);
  return call.start(input, [&](c10d::ProcessGroup& c10d) {
    if (HostExchange* const exchange = call.exchange(input))
      return std::vector<Operation::Part>{
          exchange->all_to_all(output, input, output_bytes, input_bytes, call.identity())};
    at::Tensor to = output, from = input;
    std::vector<int64_t> output_counts = output_rows, input_counts = input_rows;
    return std::vector<Operation::Part>{c10d.alltoall_base(to, from, output_counts, input_counts)};
  });
}

Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
               std::string_view label) {
  return broadcast(group, Tensors{tensor}, source, label);
}

Work broadcast(const ProcessGroup& group, const Tensors& tensors, int64_t source,
               std::string_view label) {
  Call call(group, fmt::format("broadcast (from {})", source), label);
  call.check_tensors(tensors);
  call.check_position(source);
  if (call.alone()) return Work();
  call.note(tensors);
  return call.start(tensors[0], [&](c10d::ProcessGroup& c10d) {
    HostExchange* const exchange = call.exchange(tensors[0]);
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return coalesce(c10d, tensors[0], tensors.size(), [&](size_t i) -> Operation::Part {
      if (exchange)
        return exchange->broadcast(tensors[i], static_cast<int>(source), call.identity());
      Tensors one = {tensors[i]};
      return c10d.broadcast(one, options);
    });
  });
}

}  // namespace lockstep
