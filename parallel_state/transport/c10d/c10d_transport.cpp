#include "lockstep/parallel_state/c10d_transport.h"

#include <ATen/ATen.h>

#include "lockstep/parallel_state/c10d_parts.h"
#include "lockstep/parallel_state/message_tag.h"

namespace lockstep {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

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

/// The terms of a reduction, scaled in place. NCCL's own scaled sum is not used: libtorch 2.11
/// gives it a bf16 factor in the wrong format (pytorch issue 190745).
Transport::Tensors scaled(Transport::Tensors terms, const Reduction& reduction) {
  for (const at::Tensor& term : terms) scale_terms(term, reduction);
  return terms;
}

Transport::Tensors copies_of(const Transport::Tensors& tensors) {
  Transport::Tensors copies;
  for (const at::Tensor& tensor : tensors) copies.push_back(tensor.detach().clone());
  return copies;
}

int tag_of(const at::Tensor& tensor, uint64_t identity) {
  return message_tag(identity, static_cast<int64_t>(tensor.nbytes()));
}

}  // namespace

template <class StartOne>
Transport::Parts C10dTransport::start_all(size_t count, StartOne start_one) {
  Parts parts;
  const bool together = !on_cpu() && count > 1;
  if (together) group_->startCoalescing(device_.type());
  for (size_t i = 0; i < count; ++i) {
    WorkPtr work = start_one(i);
    if (together) continue;
    if (on_cpu())
      parts.push_back(std::make_shared<CollectivePart>(std::move(work)));
    else
      parts.push_back(std::make_shared<StreamPart>(std::move(work)));
  }
  if (together)
    parts.push_back(std::make_shared<StreamPart>(group_->endCoalescing(device_.type())));
  return parts;
}

Transport::Parts C10dTransport::all_reduce(const Tensors& tensors, const Reduction& reduction,
                                           uint64_t /*identity*/) {
  c10d::AllreduceOptions options;
  options.reduceOp = to_c10d(reduction.op);
  const Tensors terms = scaled(tensors, reduction);
  return start_all(tensors.size(), [&](size_t i) {
    Tensors one = {terms[i]};
    return group_->allreduce(one, options);
  });
}

Transport::Parts C10dTransport::reduce_scatter(const Tensors& outputs, const Tensors& inputs,
                                               const Reduction& reduction, uint64_t /*identity*/) {
  c10d::ReduceScatterOptions options;
  options.reduceOp = to_c10d(reduction.op);
  const bool in_place = reduction.consumes_input || !reduction.scales();
  const Tensors terms = scaled(in_place ? inputs : copies_of(inputs), reduction);
  return start_all(inputs.size(), [&](size_t i) {
    at::Tensor to = outputs[i].view(-1), from = terms[i].view(-1);
    return group_->_reduce_scatter_base(to, from, options);
  });
}

Transport::Parts C10dTransport::all_gather(const Tensors& outputs, const Tensors& inputs,
                                           uint64_t /*identity*/) {
  return start_all(inputs.size(), [&](size_t i) {
    at::Tensor to = outputs[i].view(-1), from = inputs[i].view(-1);
    return group_->_allgather_base(to, from);
  });
}

Transport::Parts C10dTransport::all_to_all(const at::Tensor& output, const at::Tensor& input,
                                           const std::vector<int64_t>& output_rows,
                                           const std::vector<int64_t>& input_rows,
                                           uint64_t /*identity*/) {
  return start_all(1, [&](size_t /*i*/) {
    at::Tensor to = output, from = input;
    std::vector<int64_t> output_counts = output_rows, input_counts = input_rows;
    return group_->alltoall_base(to, from, output_counts, input_counts);
  });
}

Transport::Parts C10dTransport::broadcast(const Tensors& tensors, int source,
                                          uint64_t /*identity*/) {
  c10d::BroadcastOptions options;
  options.rootRank = source;
  return start_all(tensors.size(), [&](size_t i) {
    Tensors one = {tensors[i]};
    return group_->broadcast(one, options);
  });
}

std::shared_ptr<Pending> C10dTransport::message(WorkPtr work) const {
  if (on_cpu()) return std::make_shared<MessagePart>(std::move(work));
  return std::make_shared<StreamPart>(std::move(work));
}

/// The first message of each direction makes its connection, and meanwhile blocks the host.
void C10dTransport::connect(const Pairs& pairs) {
  if (on_cpu()) return;
  const int rank = group_->getRank();
  for (const auto& [first, second] : pairs) {
    if ((rank != first && rank != second) || !connected_.insert({first, second}).second) continue;
    const int peer = rank == first ? second : first;
    at::Tensor token = at::zeros({1}, at::TensorOptions(device_).dtype(at::kFloat));
    const auto greeting = [&](bool sends) {
      return sends ? send(token, peer, kUncounted) : receive(token, peer, kUncounted);
    };
    for (const bool forth : {true, false})
      for (const auto& part : greeting((rank == first) == forth))
        std::static_pointer_cast<StreamPart>(part)->wait_on_stream();
  }
}

Transport::Parts C10dTransport::send(const at::Tensor& tensor, int destination, uint64_t identity) {
  Tensors one = {tensor};
  return {message(group_->send(one, destination, tag_of(tensor, identity)))};
}

Transport::Parts C10dTransport::receive(const at::Tensor& tensor, int source, uint64_t identity) {
  Tensors one = {tensor};
  return {message(group_->recv(one, source, tag_of(tensor, identity)))};
}

Transport::Parts C10dTransport::exchange(const at::Tensor& sent, int destination,
                                         const at::Tensor& received, int source,
                                         uint64_t identity) {
  if (on_cpu()) return Transport::exchange(sent, destination, received, source, identity);
  Tensors from = {sent}, to = {received};
  group_->startCoalescing(device_.type());
  group_->send(from, destination, tag_of(sent, identity));
  group_->recv(to, source, tag_of(received, identity));
  return {std::make_shared<StreamPart>(group_->endCoalescing(device_.type()))};
}

}  // namespace lockstep
