#include "lockstep/parallel_state/work.h"

#include <algorithm>

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/flight_recorder.h"
#include "lockstep/parallel_state/gathering.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {
namespace {

using std::chrono::steady_clock;
using Way = Communicator::Uses::Way;

Way way_of(const Work::Operation& operation) {
  const int64_t peer = operation.called.position, own = operation.group->rank;
  switch (operation.called.kind) {
    case CollectiveOperation::Kind::send:
      return {own, peer};
    case CollectiveOperation::Kind::receive:
      return {peer, own};
    default:
      return Communicator::Uses::kWholeGroup;
  }
}

/// Waits in the store for the other members of a communicator that is about to be made.
void meet(const Work::Operation& operation, const Way& members) {
  const ProcessGroup::State& group = *operation.group;
  RankList ranks = group.ranks;
  if (members != Communicator::Uses::kWholeGroup)
    ranks = {ranks.at(static_cast<size_t>(members.first)),
             ranks.at(static_cast<size_t>(members.second))};
  c10d::PrefixStore store(fmt::format("first use/{}:{}", members.first, members.second),
                          group.communicator->c10d()->getStore());
  const auto failure = [&] { return group.failures->find_obstacle(ranks); };
  auto absent = failure();
  if (!absent)
    absent = gather(store, ranks, group.global_rank, operation.start + group.timeout, failure);
  if (absent) fail<CommunicationError>("{}", *absent);
}

}  // namespace

std::string describe(const Work::Operation& operation) {
  return fmt::format("{} of {} over group {}", to_string(operation.called), *operation.label,
                     ProcessGroup(operation.group).to_string());
}

std::string trace_name(const Work::Operation& operation) {
  return fmt::format("{}, {} bytes", describe(operation), operation.bytes);
}

void begin_on_device(const std::shared_ptr<Work::Operation>& operation) {
  Communicator::Uses& uses = operation->group->communicator->uses();
  const Way way = way_of(*operation);
  const std::lock_guard<std::mutex> lock(uses.mutex);
  if (uses.ways.contains(way)) return;
  const InPart meeting(operation->group->clock.get(), StepPart::communication, /*on_device=*/true);
  const Way members = std::minmax(way.first, way.second);
  if (!uses.met.contains(members)) meet(*operation, members);
  uses.met.insert(members);
  uses.ways.insert(way);
  operation->group->watch->begin(operation);
}

void fail_operation(const Work::Operation& operation, const std::string& reason) {
  const ProcessGroup::State& group = *operation.group;
  const std::string what = describe(operation);
  const double seconds =
      std::chrono::duration<double>(steady_clock::now() - operation.start).count();
  const auto [culprit, cause, difference, failed] =
      group.guard->explain(group.ranks, &group.communicator->ledger(), what, reason);
  std::string recording = dump_flight_recorder(group.global_rank);
  if (!recording.empty()) recording = "; c10d's flight recorder is in " + recording;
  const std::string end =
      fmt::format("{} failed on rank {} after {:.1f} s (timeout {:.1f} s)", what, group.global_rank,
                  seconds, group.timeout.count() / 1e3);
  if (!failed.empty()) fail<CommunicationError>("{}; so {}{}", failed, end, recording);
  fail<CommunicationError>("{}{}{}: {}{}{}", culprit, culprit.empty() ? "" : ": ", end, cause,
                           difference.empty() ? "" : "; " + difference, recording);
}

void Work::wait() {
  if (!operation_) return;
  const auto operation = std::move(operation_);
  operation_ = nullptr;
  const ProcessGroup::State& group = *operation->group;
  const InPart waiting(group.clock.get(), StepPart::communication, operation->on_device);
  try {
    if (group.watch) group.watch->check();
    if (group.recorder) group.recorder->on_wait(*operation);
  } catch (...) {
    Transport::abandon(operation->parts);
    throw;
  }
  const TraceScope scope([&] { return "wait for " + trace_name(*operation); });
  try {
    for (const auto& part : operation->parts)
      part->wait({*group.failures, operation->start, group.timeout});
  } catch (const std::exception& error) {
    Transport::abandon(operation->parts);
    fail_operation(*operation, reason_of(error, operation->group->ranks));
  }
}

bool Work::is_completed() const {
  if (!operation_) return true;
  return std::all_of(operation_->parts.begin(), operation_->parts.end(),
                     [](const auto& part) { return part->is_completed(); });
}

}  // namespace lockstep
