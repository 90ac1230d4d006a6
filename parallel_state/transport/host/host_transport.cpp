#include "lockstep/parallel_state/host_transport.h"

#include "lockstep/parallel_state/cpu_transport.h"

namespace lockstep {
namespace {

/// start_one(i) -> a part.
template <class StartOne>
Transport::Parts tasks_of(size_t count, StartOne start_one) {
  Transport::Parts parts;
  parts.reserve(count);
  try {
    for (size_t i = 0; i < count; ++i) parts.push_back(start_one(i));
  } catch (...) {
    Transport::abandon(parts);
    throw;
  }
  return parts;
}

}  // namespace

TransportMaker cpu_transport(bool observed) {
  using Reading = HostTransport::Reading;
  const Reading reading = observed                 ? Reading::never
                          : direct_memory_wanted() ? Reading::offered
                                                   : Reading::declined;
  return [reading](const auto& group, std::chrono::milliseconds timeout) {
    return std::make_unique<HostTransport>(group, timeout, reading);
  };
}

HostTransport::HostTransport(c10::intrusive_ptr<c10d::ProcessGroup> group,
                             std::chrono::milliseconds timeout, Reading reading)
    : C10dTransport(group, c10::kCPU),
      exchange_(group->getBackend(c10::kCPU), timeout),
      reading_(reading) {}

void HostTransport::greet() {
  exchange_.greet(reading_);
  if (const DirectReading* const reading = exchange_.direct_reading()) messenger_.emplace(*reading);
}

Transport::Parts HostTransport::send(const at::Tensor& tensor, int destination, uint64_t identity) {
  if (!messenger_) return C10dTransport::send(tensor, destination, identity);
  return {messenger_->send(tensor, destination, identity)};
}

Transport::Parts HostTransport::receive(const at::Tensor& tensor, int source, uint64_t identity) {
  if (!messenger_) return C10dTransport::receive(tensor, source, identity);
  return {messenger_->receive(tensor, source, identity)};
}

std::optional<int64_t> HostTransport::bytes_read() const {
  const DirectReading* const reading = exchange_.direct_reading();
  return reading ? std::optional(reading->memory.bytes_read()) : std::nullopt;
}

HostReduction HostTransport::host_reduction(const Reduction& reduction) const {
  HostReduction host;
  host.op = reduction.op == ReduceOp::max   ? HostReduceOp::max
            : reduction.op == ReduceOp::min ? HostReduceOp::min
                                            : HostReduceOp::sum;
  if (reduction.scales()) {
    host.multiplier = static_cast<double>(reduction.numerator);
    host.divisor = static_cast<double>(reduction.denominator);
  }
  if (reduction.op == ReduceOp::average)
    host.result_divisor = static_cast<double>(group().getSize());
  return host;
}

Transport::Parts HostTransport::all_reduce(const Tensors& tensors, const Reduction& reduction,
                                           uint64_t identity) {
  const HostReduction host = host_reduction(reduction);
  return tasks_of(tensors.size(),
                  [&](size_t i) { return exchange_.all_reduce(tensors[i], host, identity); });
}

Transport::Parts HostTransport::reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                               const Reduction& reduction, uint64_t identity) {
  const HostReduction host = host_reduction(reduction);
  return tasks_of(inputs.size(), [&](size_t i) {
    return exchange_.reduce_scatter(outputs[i], inputs[i], host, identity);
  });
}

Transport::Parts HostTransport::all_gather(const Tensors& outputs, const Tensors& inputs,
                                           uint64_t identity) {
  return tasks_of(inputs.size(),
                  [&](size_t i) { return exchange_.all_gather(outputs[i], inputs[i], identity); });
}

Transport::Parts HostTransport::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_rows,
                                           const std::vector<int64_t>& input_rows,
                                           uint64_t identity) {
  return {exchange_.all_to_all(output, input, bytes_of_rows(output, output_rows),
                               bytes_of_rows(input, input_rows), identity)};
}

Transport::Parts HostTransport::broadcast(const Tensors& tensors, int source, uint64_t identity) {
  return tasks_of(tensors.size(),
                  [&](size_t i) { return exchange_.broadcast(tensors[i], source, identity); });
}

}  // namespace lockstep
