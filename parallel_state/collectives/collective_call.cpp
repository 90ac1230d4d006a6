#include "lockstep/parallel_state/collective_call.h"

#include "lockstep/parallel_state/recorded_calls.h"

namespace lockstep {
namespace {

using RecordKind = CollectiveRecord::Kind;

RecordKind kind_of(const CollectiveOperation& operation) {
  switch (operation.kind) {
    case CollectiveOperation::Kind::all_to_all:
      return RecordKind::uneven_collective;
    case CollectiveOperation::Kind::send:
    case CollectiveOperation::Kind::exchange:
      return RecordKind::send;
    case CollectiveOperation::Kind::receive:
      return RecordKind::receive;
    default:
      return RecordKind::collective;
  }
}

bool is_message(RecordKind kind) { return kind == RecordKind::send || kind == RecordKind::receive; }

/// The identity and label of a call, without an entry: each launch of a recorded call adds one.
CollectiveLedger::Added identified(const ProcessGroup::State& group,
                                   const CollectiveOperation& operation, std::string_view label,
                                   int64_t numel, std::string_view dtype) {
  return {identity_of_call(operation, label, numel, dtype),
          group.communicator->ledger().share_label("", label)};
}

}  // namespace

CollectiveLedger::Added enter_call(const ProcessGroup::State& group,
                                   const CollectiveOperation& operation, std::string_view label,
                                   int64_t numel, std::string_view dtype) {
  CollectiveLedger& ledger = group.communicator->ledger();
  if (is_message(kind_of(operation)))
    return {identity_of_call("message", label, numel, dtype), ledger.share_label("", label)};
  return ledger.add(group.guard->step(), operation, label, numel, dtype);
}

SharedLabel share_label(const ProcessGroup& group, std::string_view prefix,
                        std::string_view label) {
  return group.shared_state()->communicator->ledger().share_label(prefix, label);
}

void CollectiveCall::refuse(const std::string& what) const {
  fail<UsageError>("{} of {} over group {}: {}", to_string(operation_), label_, group_.to_string(),
                   what);
}

void CollectiveCall::check_tensors(const Tensors& tensors) const {
  check(!tensors.empty(), "found no tensor, allowed: one or more");
  for (const at::Tensor& tensor : tensors) {
    check(tensor.defined(), "found an undefined tensor");
    check(tensor.is_contiguous(), "found a tensor that is not contiguous");
    check(
        tensor.scalar_type() == tensors[0].scalar_type() && tensor.device() == tensors[0].device(),
        "found tensors of several dtypes or devices, allowed: one");
    check(!tensor.is_conj() && !tensor.is_neg(),
          "found a tensor that is conjugated or negated lazily, allowed: after resolve_conj() and "
          "resolve_neg()");
  }
  const c10::Device found = tensors[0].device(), job = group_.shared_state()->device;
  const bool same_index = !job.has_index() || found.index() == job.index();
  if (alone() || found.is_cpu() || (found.type() == job.type() && same_index)) return;
  refuse(fmt::format("found tensors on {}, allowed: cpu{}", found.str(),
                     job.is_cpu() ? "" : ", and " + job.str() + ", the device of the job"));
}

void CollectiveCall::check_sizes(const Tensors& outputs, int64_t outer, const Tensors& inputs,
                                 int64_t inner) const {
  check(outputs.size() == inputs.size(), "found {} outputs and {} inputs, allowed: equal numbers",
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

void CollectiveCall::note(const Tensors& inputs) {
  const std::string_view dtype = at::toString(inputs[0].scalar_type());
  int64_t elements = 0;
  bytes_ = 0;
  for (const at::Tensor& input : inputs) {
    elements += input.numel();
    bytes_ += static_cast<int64_t>(input.nbytes());
  }
  const ProcessGroup::State& state = *group_.shared_state();
  const RecordKind kind = kind_of(operation_);
  const int64_t numel = kind == RecordKind::uneven_collective ? -1 : elements;
  numel_ = numel;
  const bool recorded = state.watch && !inputs[0].is_cpu() && state.watch->is_recording();
  CollectiveLedger::Added added = recorded ? identified(state, operation_, label_, numel, dtype)
                                           : enter_call(state, operation_, label_, numel, dtype);
  identity_ = added.identity;
  shared_label_ = std::move(added.label);
  if (!state.observer && !recorded) return;
  RecordedCall call = {group_.shared_state(), operation_, {}, numel};
  const auto show = [&](const Operation& operation) {
    const RecordKind shown_as = kind_of(operation);
    const int64_t peer =
        is_message(shown_as) ? state.ranks.at(static_cast<size_t>(operation.position)) : -1;
    call.shown.push_back({state.global_rank, state.name, state.ranks, to_string(operation),
                          std::string(label_), std::string(dtype), elements, bytes_, shown_as,
                          peer});
  };
  if (operation_.kind == Operation::Kind::exchange) {
    show({.kind = Operation::Kind::send, .position = operation_.position});
    show({.kind = Operation::Kind::receive, .position = operation_.source});
  } else {
    show(operation_);
  }
  if (recorded) return state.watch->record(call);
  for (const CollectiveRecord& record : call.shown) state.observer(record);
}

}  // namespace lockstep
