#include "lockstep/parallel_state/collectives.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/process_group_state.h"

namespace lockstep {

struct Work::Operation {
  std::shared_ptr<const ProcessGroup::State> group;
  std::string name;
  std::string label;
  bool on_cuda = false;
  std::chrono::steady_clock::time_point start;
  c10::intrusive_ptr<c10d::Work> work;
};

namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// How long a rank waits before it looks whether another one has failed.
constexpr milliseconds kPatience{500};

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

/// The message without the stack of C++ frames that c10::Error appends.
std::string reason_of(const std::exception& error) {
  const auto* c10_error = dynamic_cast<const c10::Error*>(&error);
  std::string text = c10_error ? c10_error->what_without_backtrace() : error.what();
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

[[noreturn]] void fail_operation(const Work::Operation& operation, const std::string& reason) {
  const ProcessGroup::State& group = *operation.group;
  const auto posted = group.failures->find();
  const double seconds =
      std::chrono::duration<double>(steady_clock::now() - operation.start).count();
  fail<CommunicationError>(
      "{} of {} over group {} failed on rank {} after {:.1f} s (timeout {:.1f} "
      "s): {}",
      operation.name, operation.label, ProcessGroup(operation.group).to_string(), group.global_rank,
      seconds, group.timeout.count() / 1e3, posted ? *posted : reason);
}

/// Waits on the host, looking for failed ranks now and then.
void wait_on_host(const Work::Operation& operation) {
  for (;;) {
    try {
      operation.work->wait(kPatience);
      return;
    } catch (const std::exception& error) {
      if (operation.work->isCompleted()) {
        if (operation.work->isSuccess()) return;
        fail_operation(operation, reason_of(error));
      }
      if (const auto failure = operation.group->failures->find())
        fail_operation(operation, *failure);
      if (steady_clock::now() - operation.start > operation.group->timeout + 2 * kPatience)
        fail_operation(operation, "timed out");
    }
  }
}

/// Starts an operation: call(c10d group) -> c10d work.
template <class Call>
Work start(const ProcessGroup& group, const char* name, std::string_view label, bool on_cuda,
           Call call) {
  if (group.size() == 1) return Work();
  auto operation = std::make_shared<Work::Operation>();
  operation->group = group.shared_state();
  operation->name = name;
  operation->label = label;
  operation->on_cuda = on_cuda;
  operation->start = steady_clock::now();
  try {
    operation->work = call(*operation->group->c10d);
  } catch (const std::exception& error) {
    fail_operation(*operation, reason_of(error));
  }
  return Work(std::move(operation));
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

void Work::wait() {
  if (!operation_) return;
  const auto operation = std::move(operation_);
  operation_ = nullptr;
  if (!operation->on_cuda) return wait_on_host(*operation);
  try {
    operation->work->wait();
  } catch (const std::exception& error) {
    fail_operation(*operation, reason_of(error));
  }
}

bool Work::is_completed() const { return !operation_ || operation_->work->isCompleted(); }

Work all_reduce(const ProcessGroup& group, const at::Tensor& tensor, ReduceOp op,
                std::string_view label) {
  return start(group, "all_reduce", label, tensor.is_cuda(), [&](c10d::ProcessGroup& c10d) {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::AllreduceOptions options;
    options.reduceOp = to_c10d(op);
    return c10d.allreduce(tensors, options);
  });
}

Work broadcast(const ProcessGroup& group, const at::Tensor& tensor, int64_t source,
               std::string_view label) {
  return start(group, "broadcast", label, tensor.is_cuda(), [&](c10d::ProcessGroup& c10d) {
    std::vector<at::Tensor> tensors = {tensor};
    c10d::BroadcastOptions options;
    options.rootRank = source;
    return c10d.broadcast(tensors, options);
  });
}

Work all_gather(const ProcessGroup& group, const at::Tensor& output, const at::Tensor& input,
                std::string_view label) {
  require<UsageError>(
      output.numel() == group.size() * input.numel(),
      "all_gather of {} over group {}: the output has {} elements, allowed: {} x {}", label,
      group.name(), output.numel(), group.size(), input.numel());
  if (group.size() == 1) output.view(-1).copy_(input.view(-1));
  return start(group, "all_gather", label, input.is_cuda(), [&](c10d::ProcessGroup& c10d) {
    at::Tensor to = output.view(-1), from = input.view(-1);
    return c10d._allgather_base(to, from);
  });
}

std::vector<std::string> all_gather_texts(const ProcessGroup& group, const std::string& text,
                                          std::string_view label) {
  const int64_t size = static_cast<int64_t>(text.size());
  at::Tensor sizes = at::empty({group.size()}, at::kLong);
  all_gather(group, sizes, at::full({1}, size, at::kLong), label).wait();
  const int64_t longest = sizes.max().item<int64_t>();
  if (longest == 0) return std::vector<std::string>(static_cast<size_t>(group.size()));
  at::Tensor mine = at::zeros({longest}, at::kByte);
  std::copy(text.begin(), text.end(), mine.mutable_data_ptr<uint8_t>());
  at::Tensor all = at::empty({group.size(), longest}, at::kByte);
  all_gather(group, all, mine, label).wait();
  std::vector<std::string> texts;
  for (int64_t i = 0; i < group.size(); ++i) {
    const auto* bytes = reinterpret_cast<const char*>(all.const_data_ptr<uint8_t>() + i * longest);
    texts.emplace_back(bytes, static_cast<size_t>(sizes[i].item<int64_t>()));
  }
  return texts;
}

void barrier(const ProcessGroup& group, std::string_view label) {
  at::Tensor token = at::zeros({1}, at::kByte);
  all_reduce(group, token, ReduceOp::max, label).wait();
}

}  // namespace lockstep
