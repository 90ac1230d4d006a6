#include "lockstep/tests/support/device/nccl_launches.h"

#include <cstdio>
#include <cstdlib>

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/tests/support/device/device_memory.h"
#include "lockstep/tests/support/device/device_streams.h"
#include "lockstep/tests/support/device/graph_capture.h"

namespace lockstep::testing {
namespace {

/// `stream` waits for the work that `other` has so far.
void order_behind(const c10::Stream& stream, const c10::Stream& other) {
  c10::Event event(other.device_type());
  event.record(other);
  event.block(stream);
}

std::vector<at::Tensor> tensors_of(const NcclCall& call) {
  std::vector<at::Tensor> all;
  for (const auto* tensors : {&call.inputs, &call.outputs, &call.kept})
    all.insert(all.end(), tensors->begin(), tensors->end());
  return all;
}

void end_process(const std::string& message) {
  std::fprintf(stderr, "%s\n", message.c_str());
  std::abort();
}

}  // namespace

NcclLaunches::NcclLaunches(const BackendSpec& spec, c10::Device device,
                           std::shared_ptr<NcclRules> rules)
    : spec_(spec),
      global_rank_(spec.ranks.at(static_cast<size_t>(spec.rank))),
      device_(device),
      rules_(std::move(rules)),
      timeout_(spec.timeout),
      store_(c10::make_intrusive<c10d::PrefixStore>("nccl", spec.store)),
      watchdog_(rules_->on_timeout ? rules_->on_timeout : end_process) {
  rules_->enter(this, [this] { release(); });
}

NcclLaunches::~NcclLaunches() {
  rules_->leave(this);
  release_kernels();
}

NcclLaunches::WorkPtr NcclLaunches::collective(NcclCall call) {
  const c10::DeviceGuard guard(device_);
  if (!batch_) ++collectives_;
  const Member member = group_communicator();
  const c10::Stream current = current_stream(device_.index());
  const c10::Stream stream = call.async ? member.stream : current;
  if (call.async) order_behind(stream, current);
  note_call(call.kind, call.inputs);
  const auto work = new_work(call, member);
  {
    const c10::StreamGuard on_stream(stream);
    call.before();
  }
  if (batch_)
    add_to_batch(call, member, stream);
  else
    launch(member, stream, call.kind, std::move(call.tasks));
  {
    const c10::StreamGuard on_stream(stream);
    call.after();
  }
  if (!batch_) {
    if (call.async) work->shelf()->put(tensors_of(call));
    end_work(*work, stream);
  }
  if (call.async) return work;
  if (call.blocks_host) stream.synchronize();
  return nullptr;
}

NcclLaunches::WorkPtr NcclLaunches::message(const at::Tensor& tensor, int peer, bool sends) {
  const c10::DeviceGuard guard(device_);
  const bool own_communicator = !eager_ && !batch_;
  TORCH_CHECK_WITH(DistBackendError, batch_ || peer != spec_.rank, described("message"),
                   ": NCCL sends nothing to the same rank outside of a batch");
  NcclCall call{.type = sends ? c10d::OpType::SEND : c10d::OpType::RECV,
                .kind = sends ? "send" : "recv"};
  if (!batch_) ++messages_;
  const Member member = own_communicator ? pair_communicator(peer) : group_communicator();
  order_behind(member.stream, current_stream(device_.index()));
  note_call(call.kind, {tensor});
  c10::impl::VirtualGuardImpl(device_.type())
      .recordDataPtrOnStream(tensor.storage().data_ptr(), member.stream);
  const int target = own_communicator ? 1 - member.rank : peer;
  call.tasks = {MessageTask{sends, target, host_view(tensor).data_ptr(),
                            static_cast<int64_t>(tensor.nbytes())}};
  if (batch_) {
    add_to_batch(call, member, member.stream);
    return nullptr;
  }
  call.outputs = {tensor};
  const auto work = new_work(call, member);
  launch(member, member.stream, call.kind, std::move(call.tasks));
  end_work(*work, member.stream);
  return work;
}

void NcclLaunches::begin_batch() { batch_ = Batch(); }

/// The collectives and messages of a batch become one kernel.
void NcclLaunches::add_to_batch(const NcclCall& call, const Member& member,
                                const c10::Stream& stream) {
  Batch& batch = *batch_;
  if (!batch.member) {
    const bool message = call.type == c10d::OpType::SEND || call.type == c10d::OpType::RECV;
    ++(message ? messages_ : collectives_);
  }
  batch.member = member;
  batch.stream = stream;
  batch.async = call.async;
  batch.tasks.insert(batch.tasks.end(), call.tasks.begin(), call.tasks.end());
  const std::vector<at::Tensor> tensors = tensors_of(call);
  if (call.async) batch.tensors.insert(batch.tensors.end(), tensors.begin(), tensors.end());
}

NcclLaunches::WorkPtr NcclLaunches::end_batch() {
  TORCH_CHECK(batch_, "endCoalescing() without startCoalescing()");
  Batch batch = std::move(*batch_);
  batch_.reset();
  if (!batch.member) return nullptr;
  const c10::DeviceGuard guard(device_);
  const NcclCall call{.type = c10d::OpType::COALESCED, .kind = "batch"};
  const auto work = new_work(call, *batch.member);
  work->shelf()->put(batch.tensors);
  launch(*batch.member, *batch.stream, call.kind, std::move(batch.tasks));
  end_work(*work, *batch.stream);
  return batch.async ? work : nullptr;
}

c10::intrusive_ptr<NcclWork> NcclLaunches::new_work(const NcclCall& call, const Member& member) {
  const bool message = call.type == c10d::OpType::SEND || call.type == c10d::OpType::RECV;
  const uint64_t sequence = message ? messages_ : collectives_;
  int64_t numel = 0;
  for (const at::Tensor& tensor : message ? call.outputs : call.inputs) numel += tensor.numel();
  return c10::make_intrusive<NcclWork>(
      NcclWork::Spec{.device = device_,
                     .rank = spec_.rank,
                     .type = call.type,
                     .name = fmt::format("{}, sequence {}, {} elements", described(call.kind),
                                         sequence, numel),
                     .sequence = sequence,
                     .timeout = timeout_,
                     .abort = [member] { member.communicator->abort(member.rank); },
                     .error = [rules = rules_] { return rules->error(); },
                     .blocks_host = call.blocks_host},
      call.outputs);
}

void NcclLaunches::launch(const Member& member, const c10::Stream& stream, const std::string& kind,
                          std::vector<KernelTask> tasks) {
  if (tasks.empty()) return;
  connect(member, kind, tasks);
  const auto count = [rules = rules_, rank = global_rank_] {
    rules->note(rank, [](NcclCounts& counts) { ++counts.kernels; });
  };
  const std::string what = "nccl " + kind;
  const auto kernel = [communicator = member.communicator, rank = member.rank, rules = rules_,
                       global = global_rank_, tasks = std::move(tasks)] {
    const NcclRules::OnDevice on_device(*rules, global);
    communicator->run(rank, tasks);
  };
  const auto capture = GraphCapture::of(stream);
  if (!capture) {
    count();
    return enqueue(stream, what, kernel);
  }
  capture->record(stream, what,
                  [count, what, kernel, own = member.stream,
                   reference = graph_references_](const c10::Stream& replaying) {
                    count();
                    order_behind(replaying, own);
                    enqueue_part(replaying, what, kernel);
                    order_behind(own, replaying);
                  });
}

void NcclLaunches::end_work(NcclWork& work, const c10::Stream& stream) {
  work.record_end(stream);
  if (!GraphCapture::of(stream)) watchdog_.watch(work);
}

void NcclLaunches::connect(const Member& member, const std::string& kind,
                           const std::vector<KernelTask>& tasks) {
  const auto ends = member.communicator->unconnected(member.rank, tasks);
  if (ends.empty()) return;
  std::string where = described("first " + kind);
  for (const auto& [from, to, sends] : ends)
    where += fmt::format(", {} -> {}", member.ranks[static_cast<size_t>(from)],
                         member.ranks[static_cast<size_t>(to)]);
  refuse_in_capture(current_stream(device_.index()), where);
  const NcclRules::HostBlock block(*rules_, global_rank_, where);
  if (!member.communicator->connect(member.rank, ends)) fail_aborted();
}

void NcclLaunches::note_call(const std::string& kind, const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += static_cast<int64_t>(tensor.nbytes());
  const auto note = [=, rules = rules_, rank = global_rank_, group = spec_.group_name] {
    rules->note(rank, [&](NcclCounts& counts) {
      NcclCalls& calls = counts.calls[group][kind];
      ++calls.calls;
      calls.bytes += bytes;
    });
  };
  now_or_at_replays(current_stream(device_.index()), note);
}

std::string NcclLaunches::described(const std::string& what) const {
  return fmt::format("rank {}, group {}, {}", global_rank_, spec_.group_name, what);
}

}  // namespace lockstep::testing
