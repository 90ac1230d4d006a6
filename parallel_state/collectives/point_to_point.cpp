#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_call.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

using MessageKind = CollectiveOperation::Kind;

/// For contiguous tensors.
bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  const auto begin = [](const at::Tensor& x) {
    return static_cast<const char*>(x.const_data_ptr());
  };
  return a.nbytes() > 0 && b.nbytes() > 0 && begin(a) < begin(b) + b.nbytes() &&
         begin(b) < begin(a) + a.nbytes();
}

void check_peer(const CollectiveCall& call, const ProcessGroup& group, int64_t peer) {
  call.check_position(peer);
  call.check(peer != group.rank(), "found this rank as the peer, allowed: another one");
}

Work message(const ProcessGroup& group, const at::Tensor& tensor, int64_t peer, MessageKind kind,
             std::string_view label) {
  const CollectiveOperation called = {.kind = kind, .position = peer};
  CollectiveCall call(group, called, label);
  const std::vector<at::Tensor> one = {tensor};
  call.check_tensors(one);
  check_peer(call, group, peer);
  call.note(one);
  Work work = call.start(tensor, [&](Transport& transport) {
    const int position = static_cast<int>(peer);
    return kind == MessageKind::send ? transport.send(tensor, position, call.identity())
                                     : transport.receive(tensor, position, call.identity());
  });
  const auto& state = *group.shared_state();
  if (state.recorder) state.recorder->on_message(state, called, label, tensor);
  return work;
}

void connect_pair(const ProcessGroup& group, int64_t first, int64_t second) {
  if (const auto& recorder = group.shared_state()->recorder)
    return recorder->on_pair(*group.shared_state(), first, second);
  Work::Operation operation;
  operation.group = group.shared_state();
  const bool begins = first == group.rank();
  operation.called = {.kind = begins ? MessageKind::send : MessageKind::receive,
                      .position = begins ? second : first};
  operation.label = share_label(group, "", "first message");
  operation.on_device = true;
  Transport& transport = *operation.group->communicator->device_transport();
  start_operation(std::move(operation), [&] {
    transport.connect({{static_cast<int>(first), static_cast<int>(second)}});
    return Transport::Parts();
  }).wait();
}

}  // namespace

void connect_pairs(const ProcessGroup& group,
                   const std::vector<std::pair<int64_t, int64_t>>& pairs) {
  const auto& state = *group.shared_state();
  if (!state.communicator || !state.communicator->device_transport()) return;
  for (const auto& [first, second] : pairs)
    if (first == group.rank() || second == group.rank()) connect_pair(group, first, second);
}

Work send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
          std::string_view label) {
  return message(group, tensor, destination, MessageKind::send, label);
}

Work receive(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
             std::string_view label) {
  return message(group, tensor, source, MessageKind::receive, label);
}

Work exchange(const ProcessGroup& group, const at::Tensor& sent, int64_t destination,
              const at::Tensor& received, int64_t source, std::string_view label) {
  CollectiveCall call(
      group, {.kind = MessageKind::exchange, .position = destination, .source = source}, label);
  call.check_tensors({sent, received});
  call.check(sent.sizes() == received.sizes(), "found tensors of {} and {}, allowed: of one shape",
             fmt::join(sent.sizes(), " x "), fmt::join(received.sizes(), " x "));
  call.check(!share_memory(sent, received),
             "found memory that is both sent and received, allowed: tensors that do not overlap");
  for (const int64_t peer : {destination, source}) check_peer(call, group, peer);
  call.note({sent});
  return call.start(sent, [&](Transport& transport) {
    return transport.exchange(sent, static_cast<int>(destination), received,
                              static_cast<int>(source), call.identity());
  });
}

}  // namespace lockstep
