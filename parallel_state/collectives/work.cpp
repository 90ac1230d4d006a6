#include "lockstep/parallel_state/work.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/flight_recorder.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {
namespace {

using std::chrono::steady_clock;

std::string describe(const Work::Operation& operation) {
  return fmt::format("{} of {} over group {}", to_string(operation.called), *operation.label,
                     ProcessGroup(operation.group).to_string());
}

}  // namespace

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
  if (group.watch) group.watch->check();
  try {
    for (const auto& part : operation->parts)
      part->wait({*group.failures, operation->start, group.timeout});
  } catch (const std::exception& error) {
    fail_operation(*operation, reason_of(error, operation->group->ranks));
  }
}

bool Work::is_completed() const {
  if (!operation_) return true;
  return std::all_of(operation_->parts.begin(), operation_->parts.end(),
                     [](const auto& part) { return part->is_completed(); });
}

}  // namespace lockstep
