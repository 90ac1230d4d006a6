#include "lockstep/parallel_state/rank_recorder.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "lockstep/core/text_digest.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {
namespace {

uint64_t digest_of(const ProgramCall& call) {
  uint64_t digest = digest_with(kDigestStart, call.group);
  digest = digest_with(digest, static_cast<uint64_t>(call.operation.kind));
  digest = digest_with(digest, static_cast<uint64_t>(call.operation.position));
  digest = digest_with(digest, static_cast<uint64_t>(call.numel));
  return text_digest(call.label, digest);
}

uint64_t digest_of(const ProgramKernel& kernel) {
  const uint64_t digest = digest_with(kDigestStart, static_cast<uint64_t>(kernel.bytes));
  return text_digest(kernel.name, digest);
}

/// The index of `wanted` in `all`; appends it if it is not there.
template <class T>
uint32_t index_in(std::vector<T>& all, std::vector<uint32_t>& alike, const T& wanted) {
  for (const uint32_t known : alike)
    if (all[known] == wanted) return known;
  alike.push_back(static_cast<uint32_t>(all.size()));
  all.push_back(wanted);
  return alike.back();
}

}  // namespace

void KnownMessages::send(const Way& way, const at::Tensor& tensor) {
  const bool kept = tensor.is_cpu() && tensor.nbytes() <= kMostBytes;
  sent_[way].push_back(kept ? tensor.detach().clone() : at::Tensor());
}

void KnownMessages::receive(Way way, size_t index, const at::Tensor& tensor) const {
  way.sender = represented_by_.at(static_cast<size_t>(way.sender));
  const auto known = sent_.find(way);
  if (known == sent_.end() || index >= known->second.size()) return;
  const at::Tensor& message = known->second[index];
  if (!message.defined() || !tensor.is_cpu() || message.numel() != tensor.numel() ||
      message.scalar_type() != tensor.scalar_type())
    return;
  const at::NoGradGuard no_grad;
  tensor.copy_(message.view(tensor.sizes()));
}

void RankRecorder::add(ProgramEvent::Kind kind, uint32_t value) {
  program_.events.push_back({kind, value});
}

void RankRecorder::on_connect(const Communicator& communicator, const std::string& name,
                              const RankList& ranks, const std::string& apart) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto index = static_cast<uint32_t>(program_.groups.size());
  const auto position = std::find(ranks.begin(), ranks.end(), program_.rank) - ranks.begin();
  program_.groups.push_back({name, apart, ranks, position});
  groups_[&communicator] = index;
  add(ProgramEvent::Kind::connect, index);
}

uint32_t RankRecorder::group_of(const ProcessGroup::State& group) const {
  return groups_.at(group.communicator.get());
}

uint64_t RankRecorder::shape_of(const ProcessGroup::State& group) {
  const auto [known, is_new] = shapes_.try_emplace(group.communicator.get(), kDigestStart);
  if (is_new)
    for (const int64_t rank : group.ranks)
      known->second = digest_with(known->second, static_cast<uint64_t>(rank - group.ranks.front()));
  return known->second;
}

uint32_t RankRecorder::index_of(const ProgramCall& call) {
  return index_in(program_.calls, calls_[digest_of(call)], call);
}

void RankRecorder::on_pair(const ProcessGroup::State& group, int64_t first, int64_t second) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool begins = group.rank == first;
  ProgramCall call{.group = group_of(group), .label = "first message", .on_device = true};
  call.operation.kind =
      begins ? CollectiveOperation::Kind::send : CollectiveOperation::Kind::receive;
  call.operation.position = begins ? second : first;
  add(ProgramEvent::Kind::pair, index_of(call));
}

uint32_t RankRecorder::on_start(const Work::Operation& operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  add(ProgramEvent::Kind::start, index_of({.group = group_of(*operation.group),
                                           .operation = operation.called,
                                           .label = *operation.label,
                                           .dtype = operation.dtype,
                                           .numel = operation.numel,
                                           .bytes = operation.bytes,
                                           .on_device = operation.on_device}));
  return started_++;
}

void RankRecorder::on_wait(const Work::Operation& operation) {
  if (std::this_thread::get_id() != host_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (operation.on_device) ++device_waits_;
  add(ProgramEvent::Kind::wait, operation.number);
}

void RankRecorder::on_message(const ProcessGroup::State& group, const CollectiveOperation& called,
                              std::string_view label, const at::Tensor& tensor) {
  if (!messages_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  const bool sends = called.kind == CollectiveOperation::Kind::send;
  const int64_t sender = sends ? group.rank : called.position;
  const KnownMessages::Way way = {.sender = group.ranks.at(static_cast<size_t>(sender)),
                                  .group = group.name,
                                  .shape = shape_of(group),
                                  .position = sender,
                                  .receiver = sends ? called.position : group.rank,
                                  .label = std::string(label)};
  if (sends) return messages_->send(way, tensor);
  messages_->receive(way, received_[way]++, tensor);
}

int64_t RankRecorder::longest_text(std::string_view label, int64_t own) {
  int64_t& longest = text_lengths_.try_emplace(std::string(label), own).first->second;
  texts_grew_ = texts_grew_ || own > longest;
  return longest = std::max(longest, own);
}

void RankRecorder::on_kernel(const ProgramKernel& kernel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  add(ProgramEvent::Kind::kernel, index_in(program_.kernels, kernels_[digest_of(kernel)], kernel));
}

std::optional<RankRecorder::Passage> RankRecorder::since(const Mark& begin) const {
  using Kind = ProgramEvent::Kind;
  Passage passage = {.events = {program_.events.begin() + static_cast<ptrdiff_t>(begin.events),
                                program_.events.end()},
                     .started = started_ - begin.started,
                     .device_waits = device_waits_ - begin.device_waits};
  for (ProgramEvent& event : passage.events) {
    if (event.kind == Kind::connect || event.kind == Kind::pair) return std::nullopt;
    if (event.kind != Kind::wait && event.kind != Kind::host_wait) continue;
    const uint32_t before = event.kind == Kind::wait ? begin.started : begin.device_waits;
    if (event.value < before) return std::nullopt;
    event.value -= before;
  }
  return passage;
}

void RankRecorder::repeat(const Passage& passage) {
  const Mark begin = mark();
  for (const ProgramEvent& event : passage.events)
    if (event.kind == ProgramEvent::Kind::host_wait)
      on_host_wait(begin.device_waits + event.value);
    else if (event.kind == ProgramEvent::Kind::wait)
      add(event.kind, begin.started + event.value);
    else
      add(event.kind, event.value);
  started_ += passage.started;
  device_waits_ += passage.device_waits;
}

void RankRecorder::end_step() {
  const std::lock_guard<std::mutex> lock(mutex_);
  program_.step_ends.push_back(program_.events.size());
}

void RankRecorder::on_host_wait(uint32_t waits) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const ProgramEvent event = {ProgramEvent::Kind::host_wait, waits};
  if (!program_.events.empty() && program_.events.back() == event) return;
  program_.events.push_back(event);
}

}  // namespace lockstep
