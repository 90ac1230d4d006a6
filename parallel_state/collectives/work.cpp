#include "lockstep/parallel_state/work.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/flight_recorder.h"
#include "lockstep/parallel_state/operation.h"

namespace lockstep {
namespace {

using std::chrono::steady_clock;

std::string describe(const Work::Operation& operation) {
  return fmt::format("{} of {} over group {}", operation.name, operation.label,
                     ProcessGroup(operation.group).to_string());
}

/// Waits up to kPatience. Returns whether the part has ended.
bool wait_for(const Work::Operation::C10dWork& work) {
  try {
    work->wait(kPatience);
    return true;
  } catch (const std::exception&) {
    if (!work->isCompleted()) return false;
    if (work->isSuccess()) return true;
    throw;
  }
}
bool wait_for(const std::shared_ptr<HostTask>& task) { return task->wait_for(kPatience); }

bool is_completed(const Work::Operation::C10dWork& work) { return work->isCompleted(); }
bool is_completed(const std::shared_ptr<HostTask>& task) { return task->is_completed(); }

/// Waits on the host, looking for failed ranks now and then.
void wait_on_host(const Work::Operation& operation, const Work::Operation::Part& part) {
  const auto deadline = operation.start + operation.group->timeout + 2 * kPatience;
  for (;;) {
    if (std::visit([](const auto& p) { return wait_for(p); }, part)) return;
    if (const auto failure = operation.group->failures->find())
      throw CommunicationError(failure->text());
    require<CommunicationError>(steady_clock::now() < deadline, "timed out");
  }
}

/// A wait of Gloo's that a timeout would leave unusable, so another thread looks for failures.
void wait_for_message(const Work::Operation& operation, const Work::Operation::C10dWork& work) {
  if (work->isCompleted()) return;
  const FailureBoard::Watch watch(*operation.group->failures, [&work] { work->abort(); });
  require<CommunicationError>(work->wait(operation.group->timeout), "given up");
}

void wait_for_part(const Work::Operation& operation, const Work::Operation::Part& part) {
  const auto* const work = std::get_if<Work::Operation::C10dWork>(&part);
  if (operation.on_cuda && work)
    (*work)->wait();
  else if (operation.point_to_point && work)
    wait_for_message(operation, *work);
  else
    wait_on_host(operation, part);
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
  try {
    for (const Operation::Part& part : operation->parts) wait_for_part(*operation, part);
  } catch (const std::exception& error) {
    fail_operation(*operation, reason_of(error, operation->group->ranks));
  }
}

bool Work::is_completed() const {
  if (!operation_) return true;
  return std::all_of(operation_->parts.begin(), operation_->parts.end(), [](auto& part) {
    return std::visit([](auto& p) { return lockstep::is_completed(p); }, part);
  });
}

}  // namespace lockstep
