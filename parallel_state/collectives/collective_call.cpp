#include "lockstep/parallel_state/collective_call.h"

namespace lockstep {

void CollectiveCall::refuse(const std::string& what) const {
  fail<UsageError>("{} of {} over group {}: {}", operation_, label_, group_.to_string(), what);
}

void CollectiveCall::check_tensors(const Tensors& tensors) const {
  check(!tensors.empty(), "found no tensor, allowed: one or more");
  for (const at::Tensor& tensor : tensors) {
    check(tensor.defined(), "found an undefined tensor");
    check(tensor.is_contiguous(), "found a tensor that is not contiguous");
    check(
        tensor.scalar_type() == tensors[0].scalar_type() && tensor.device() == tensors[0].device(),
        "found tensors of several dtypes or devices, allowed: one");
  }
}

void CollectiveCall::check_sizes(const Tensors& outputs, int64_t outer, const Tensors& inputs,
                                 int64_t inner) const {
  check(outputs.size() == inputs.size(), "found {} outputs and {} inputs, allowed: as many",
        outputs.size(), inputs.size());
  check_tensors(outputs);
  check_tensors(inputs);
  check_tensors({outputs[0], inputs[0]});
  for (size_t i = 0; i < inputs.size(); ++i)
    check(outputs[i].numel() * inner == inputs[i].numel() * outer,
          "the output has {} elements and the input {}, allowed: a ratio of {} : {}",
          outputs[i].numel(), inputs[i].numel(), outer, inner);
}

void CollectiveCall::check_position(int64_t position) const {
  check(position >= 0 && position < group_.size(), "found rank {} of the group, allowed: 0 to {}",
        position, group_.size() - 1);
}

void CollectiveCall::note(const Tensors& inputs, Kind kind, int64_t peer) {
  const ProcessGroup::State& state = *group_.shared_state();
  const std::string_view dtype = at::toString(inputs[0].scalar_type());
  int64_t elements = 0, bytes = 0;
  for (const at::Tensor& input : inputs) {
    elements += input.numel();
    bytes += static_cast<int64_t>(input.nbytes());
  }
  const int64_t numel = kind == Kind::uneven_collective ? -1 : elements;
  const bool message = kind == Kind::send || kind == Kind::receive;
  identity_ = message ? identity_of_call("message", label_, numel, dtype)
                      : state.communicator->ledger().add(state.guard->step(), operation_, label_,
                                                         numel, dtype);
  if (state.observer)
    state.observer({state.global_rank, state.name, state.ranks, operation_, std::string(label_),
                    std::string(dtype), elements, bytes, kind,
                    message ? state.ranks.at(static_cast<size_t>(peer)) : -1});
}

}  // namespace lockstep
