#include "lockstep/tests/support/device/nccl_calls.h"

#include <algorithm>
#include <cstddef>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_memory.h"

namespace lockstep::testing {
namespace {

using Op = c10d::OpType;
using Task = CollectiveTask::Kind;

std::byte* address_of(const at::Tensor& tensor) {
  return static_cast<std::byte*>(host_view(tensor).data_ptr());
}

NcclCall call_of(const NcclCaller& caller, Op type, const std::string& kind, const Tensors& inputs,
                 const Tensors& outputs) {
  check_nccl_tensors(caller, inputs, kind);
  check_nccl_tensors(caller, outputs, kind);
  return {.type = type, .kind = kind, .inputs = inputs, .outputs = outputs};
}

/// NCCL launches nothing if there are no elements.
void add_task(NcclCall& call, const CollectiveTask& task) {
  if (task.count > 0) call.tasks.emplace_back(task);
}

void add_message(NcclCall& call, bool sends, int peer, std::byte* data, int64_t bytes) {
  if (bytes > 0) call.tasks.emplace_back(MessageTask{sends, peer, data, bytes});
}

void add_message(NcclCall& call, bool sends, size_t peer, const at::Tensor& tensor) {
  add_message(call, sends, static_cast<int>(peer), address_of(tensor),
              static_cast<int64_t>(tensor.nbytes()));
}

/// `parts` has one tensor, or one part of a tensor, for each rank.
void check_parts(const NcclCaller& caller, size_t parts, const std::string& kind) {
  TORCH_CHECK_VALUE(parts == static_cast<size_t>(caller.size), kind, ": found ", parts,
                    " parts, allowed: one for each of ", caller.size, " ranks");
}

/// `whole` has as many elements as `part` for each rank, and the same dtype.
void check_whole(const NcclCaller& caller, const at::Tensor& whole, const at::Tensor& part,
                 const std::string& kind) {
  TORCH_CHECK_TYPE(whole.scalar_type() == part.scalar_type(), kind, ": found ", whole.scalar_type(),
                   " and ", part.scalar_type(), ", allowed: one dtype");
  TORCH_CHECK_VALUE(whole.numel() == part.numel() * caller.size, kind, ": found ", whole.numel(),
                    " elements for ", caller.size, " ranks and ", part.numel(), " for one");
}

Op one_or_several(const Tensors& tensors, Op one) {
  return tensors.size() == 1 ? one : Op::COALESCED;
}

/// One tensor for a stack of all of them, which have one shape and dtype.
at::Tensor flat_like(const Tensors& tensors) {
  std::vector<int64_t> sizes = {static_cast<int64_t>(tensors.size())};
  sizes.insert(sizes.end(), tensors.front().sizes().begin(), tensors.front().sizes().end());
  return at::empty(sizes, tensors.front().options());
}

/// Number of elements of each rank's part.
std::vector<int64_t> parts_of(const NcclCaller& caller, const at::Tensor& tensor,
                              const std::vector<int64_t>& rows) {
  if (rows.empty()) {
    TORCH_CHECK_VALUE(tensor.numel() % caller.size == 0, "alltoall: found ", tensor.numel(),
                      " elements for ", caller.size, " ranks");
    return std::vector<int64_t>(static_cast<size_t>(caller.size), tensor.numel() / caller.size);
  }
  check_parts(caller, rows.size(), "alltoall");
  int64_t total = 0;
  for (const int64_t n : rows) total += n;
  TORCH_CHECK_VALUE(total == tensor.size(0), "alltoall: found parts of ", total,
                    " rows together, the tensor has ", tensor.size(0));
  std::vector<int64_t> parts;
  for (const int64_t n : rows) parts.push_back(total == 0 ? 0 : n * (tensor.numel() / total));
  return parts;
}

}  // namespace

void check_nccl_tensors(const NcclCaller& caller, const Tensors& tensors, const std::string& kind) {
  for (const at::Tensor& tensor : tensors) {
    TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, kind, ": found a tensor of layout ",
                      tensor.layout(), ", allowed: dense");
    TORCH_CHECK_VALUE(tensor.device() == caller.device, kind, ": found a tensor on ",
                      tensor.device(), ", allowed: ", caller.device);
    TORCH_CHECK_VALUE(tensor.is_contiguous(tensor.suggest_memory_format()), kind,
                      ": found strides ", tensor.strides(), " of sizes ", tensor.sizes(),
                      ", allowed: contiguous tensors; c10d takes messages that are not, and sends "
                      "the memory as it lies");
    check_nccl_dtype(tensor.scalar_type());
  }
}

int check_nccl_rank(const NcclCaller& caller, int64_t rank, const std::string& kind) {
  TORCH_CHECK_VALUE(rank >= 0 && rank < caller.size, kind, ": found rank ", rank,
                    ", allowed: 0 to ", caller.size - 1);
  return static_cast<int>(rank);
}

NcclCall all_reduce_call(const NcclCaller& caller, const Tensors& tensors,
                         const c10d::ReduceOp& op) {
  NcclCall call =
      call_of(caller, one_or_several(tensors, Op::ALLREDUCE), "allreduce", tensors, tensors);
  for (const at::Tensor& tensor : tensors)
    add_task(call, {.kind = Task::all_reduce,
                    .input = address_of(tensor),
                    .output = address_of(tensor),
                    .count = tensor.numel(),
                    .dtype = tensor.scalar_type(),
                    .reduction = nccl_reduction(op, tensor.scalar_type())});
  return call;
}

NcclCall reduce_call(const NcclCaller& caller, const at::Tensor& output, const at::Tensor& input,
                     const c10d::ReduceOp& op, int64_t root) {
  NcclCall call = call_of(caller, Op::REDUCE, "reduce", {input}, {output});
  add_task(call, {.kind = Task::reduce,
                  .input = address_of(input),
                  .output = address_of(output),
                  .count = input.numel(),
                  .dtype = input.scalar_type(),
                  .root = check_nccl_rank(caller, root, "reduce"),
                  .reduction = nccl_reduction(op, input.scalar_type())});
  return call;
}

NcclCall broadcast_call(const NcclCaller& caller, const at::Tensor& output, const at::Tensor& input,
                        int64_t root) {
  NcclCall call = call_of(caller, Op::BROADCAST, "broadcast", {input}, {output});
  add_task(call, {.kind = Task::broadcast,
                  .input = address_of(input),
                  .output = address_of(output),
                  .count = input.numel(),
                  .dtype = input.scalar_type(),
                  .root = check_nccl_rank(caller, root, "broadcast")});
  return call;
}

NcclCall all_gather_call(const NcclCaller& caller, const Tensors& outputs, const Tensors& inputs) {
  NcclCall call =
      call_of(caller, one_or_several(inputs, Op::_ALLGATHER_BASE), "allgather", inputs, outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(caller, outputs.at(i), inputs[i], "allgather");
    add_task(call, {.kind = Task::all_gather,
                    .input = address_of(inputs[i]),
                    .output = address_of(outputs[i]),
                    .count = inputs[i].numel(),
                    .dtype = inputs[i].scalar_type()});
  }
  return call;
}

NcclCall all_gather_list_call(const NcclCaller& caller, const Tensors& outputs,
                              const at::Tensor& input) {
  check_parts(caller, outputs.size(), "allgather");
  check_nccl_tensors(caller, outputs, "allgather");
  const at::Tensor flat = flat_like(outputs);
  NcclCall call = all_gather_call(caller, {flat}, {input});
  call.type = Op::ALLGATHER;
  call.kept = outputs;
  call.after = [flat, outputs] {
    for (size_t i = 0; i < outputs.size(); ++i)
      outputs[i].copy_(flat[static_cast<int64_t>(i)], /*non_blocking=*/true);
  };
  return call;
}

NcclCall reduce_scatter_call(const NcclCaller& caller, const Tensors& outputs,
                             const Tensors& inputs, const c10d::ReduceOp& op) {
  NcclCall call = call_of(caller, one_or_several(inputs, Op::_REDUCE_SCATTER_BASE),
                          "reduce_scatter", inputs, outputs);
  for (size_t i = 0; i < inputs.size(); ++i) {
    check_whole(caller, inputs[i], outputs.at(i), "reduce_scatter");
    add_task(call, {.kind = Task::reduce_scatter,
                    .input = address_of(inputs[i]),
                    .output = address_of(outputs[i]),
                    .count = outputs[i].numel(),
                    .dtype = outputs[i].scalar_type(),
                    .reduction = nccl_reduction(op, outputs[i].scalar_type())});
  }
  return call;
}

NcclCall reduce_scatter_list_call(const NcclCaller& caller, const at::Tensor& output,
                                  const Tensors& inputs, const c10d::ReduceOp& op) {
  check_parts(caller, inputs.size(), "reduce_scatter");
  check_nccl_tensors(caller, inputs, "reduce_scatter");
  const at::Tensor flat = flat_like(inputs);
  NcclCall call = reduce_scatter_call(caller, {output}, {flat}, op);
  call.type = Op::REDUCE_SCATTER;
  call.kept = inputs;
  call.before = [flat, inputs] {
    for (size_t i = 0; i < inputs.size(); ++i)
      flat[static_cast<int64_t>(i)].copy_(inputs[i], /*non_blocking=*/true);
  };
  return call;
}

NcclCall all_to_all_call(const NcclCaller& caller, const at::Tensor& output,
                         const at::Tensor& input, const std::vector<int64_t>& output_rows,
                         const std::vector<int64_t>& input_rows) {
  NcclCall call = call_of(caller, Op::ALLTOALL_BASE, "alltoall", {input}, {output});
  const std::vector<int64_t> to = parts_of(caller, output, output_rows);
  const std::vector<int64_t> from = parts_of(caller, input, input_rows);
  std::byte* sent = address_of(input);
  std::byte* received = address_of(output);
  for (int peer = 0; peer < caller.size; ++peer) {
    const int64_t sent_bytes = from[static_cast<size_t>(peer)] * input.element_size();
    const int64_t received_bytes = to[static_cast<size_t>(peer)] * output.element_size();
    add_message(call, true, peer, sent, sent_bytes);
    add_message(call, false, peer, received, received_bytes);
    sent += sent_bytes;
    received += received_bytes;
  }
  return call;
}

NcclCall all_to_all_list_call(const NcclCaller& caller, const Tensors& outputs,
                              const Tensors& inputs) {
  check_parts(caller, outputs.size(), "alltoall");
  check_parts(caller, inputs.size(), "alltoall");
  NcclCall call = call_of(caller, Op::ALLTOALL, "alltoall", inputs, outputs);
  for (size_t peer = 0; peer < outputs.size(); ++peer) {
    add_message(call, true, peer, inputs[peer]);
    add_message(call, false, peer, outputs[peer]);
  }
  return call;
}

NcclCall gather_call(const NcclCaller& caller, const Tensors& outputs, const at::Tensor& input,
                     int64_t root) {
  const int to = check_nccl_rank(caller, root, "gather");
  const bool is_root = to == caller.rank;
  NcclCall call = call_of(caller, Op::GATHER, "gather", {input}, outputs);
  if (is_root) check_parts(caller, outputs.size(), "gather");
  if (!is_root) add_message(call, true, static_cast<size_t>(to), input);
  for (size_t peer = 0; peer < outputs.size(); ++peer)
    if (peer == static_cast<size_t>(caller.rank))
      outputs[peer].copy_(input, /*non_blocking=*/true);
    else
      add_message(call, false, peer, outputs[peer]);
  return call;
}

NcclCall scatter_call(const NcclCaller& caller, const at::Tensor& output, const Tensors& inputs,
                      int64_t root) {
  const int from = check_nccl_rank(caller, root, "scatter");
  const bool is_root = from == caller.rank;
  NcclCall call = call_of(caller, Op::SCATTER, "scatter", inputs, {output});
  if (is_root) check_parts(caller, inputs.size(), "scatter");
  if (!is_root) add_message(call, false, static_cast<size_t>(from), output);
  for (size_t peer = 0; peer < inputs.size(); ++peer)
    if (peer == static_cast<size_t>(caller.rank))
      output.copy_(inputs[peer], /*non_blocking=*/true);
    else
      add_message(call, true, peer, inputs[peer]);
  return call;
}

NcclCall barrier_call(const NcclCaller& caller) {
  const at::Tensor flag = at::zeros({1}, at::TensorOptions(at::kFloat).device(caller.device));
  NcclCall call = all_reduce_call(caller, {flag}, c10d::ReduceOp::SUM);
  call.kind = "barrier";
  call.blocks_host = true;
  return call;
}

}  // namespace lockstep::testing
