#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/collective_call.h"
#include "lockstep/parallel_state/collectives.h"

namespace lockstep {
namespace {

Work message(const ProcessGroup& group, const at::Tensor& tensor, int64_t peer, bool is_send,
             std::string_view label) {
  CollectiveCall call(
      group, is_send ? fmt::format("send (to {})", peer) : fmt::format("receive (from {})", peer),
      label);
  const std::vector<at::Tensor> one = {tensor};
  call.check_tensors(one);
  call.check_position(peer);
  call.check(peer != group.rank(), "found this rank as the peer, allowed: another one");
  using Kind = CollectiveCall::Kind;
  call.note(one, is_send ? Kind::send : Kind::receive, peer);
  return call.start(tensor, [&](Transport& transport) {
    const int position = static_cast<int>(peer);
    return is_send ? transport.send(tensor, position, call.identity())
                   : transport.receive(tensor, position, call.identity());
  });
}

}  // namespace

Work send(const ProcessGroup& group, const at::Tensor& tensor, int64_t destination,
          std::string_view label) {
  return message(group, tensor, destination, /*is_send=*/true, label);
}

Work receive(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
             std::string_view label) {
  return message(group, tensor, source, /*is_send=*/false, label);
}

}  // namespace lockstep
