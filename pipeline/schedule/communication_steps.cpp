#include "lockstep/pipeline/communication_steps.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "lockstep/core/check.h"
#include "lockstep/pipeline/simulation.h"

namespace lockstep {
namespace {

/// A task that starts, or the transfer of its output.
struct Event {
  int64_t time;
  bool is_start;
  int64_t rank;
  PipelineTask task;

  /// Transfers first, so that they precede the tasks that need them; those of even ranks together,
  /// so that neighbouring pairs exchange at once.
  auto order() const { return std::tuple(time, is_start, rank % 2, rank); }
};

std::vector<Event> events_of(const PipelineSchedule& schedule) {
  const Timeline timeline = simulate(schedule, reference_cost(schedule));
  std::vector<Event> events;
  for (size_t r = 0; r < schedule.ranks.size(); ++r)
    for (size_t i = 0; i < schedule.ranks[r].size(); ++i) {
      const auto rank = static_cast<int64_t>(r);
      const PipelineTask& task = schedule.ranks[r][i];
      events.push_back({timeline.ranks[r][i].start, true, rank, task});
      const auto consumer = schedule.consumer_of(rank, task);
      if (consumer && consumer->rank != rank)
        events.push_back({timeline.ranks[r][i].end, false, rank, task});
    }
  std::sort(events.begin(), events.end(),
            [](const Event& a, const Event& b) { return a.order() < b.order(); });
  return events;
}

/// The number of inputs of one kind from one rank that may wait for their tasks.
constexpr size_t kInputsAhead = 2;

/// The position of the task whose input arrives with the receive at position `receive`.
size_t consumed_at(const std::vector<PipelineStep>& steps, size_t receive) {
  const PipelineStep compute = {PipelineStep::Kind::compute, steps[receive].task};
  const auto begin = steps.begin() + static_cast<std::ptrdiff_t>(receive);
  return static_cast<size_t>(std::find(begin, steps.end(), compute) - steps.begin());
}

/// Whether the last of three ranks or more also exchanges with the first.
bool form_a_circle(const StepLists& steps) {
  const auto& first = steps.front();
  return std::any_of(first.begin(), first.end(),
                     [](const PipelineStep& step) { return step.peer > 1; });
}

}  // namespace

std::string to_string(const PipelineStep& step) {
  const std::string task = to_string(step.task);
  switch (step.kind) {
    case PipelineStep::Kind::send:
      return fmt::format("send {} to rank {}", task, step.peer);
    case PipelineStep::Kind::receive:
      return fmt::format("receive for {} from rank {}", task, step.peer);
    default:
      return task;
  }
}

StepLists communication_steps(const PipelineSchedule& schedule) {
  StepLists steps(schedule.ranks.size());
  for (const Event& event : events_of(schedule)) {
    auto& own = steps[static_cast<size_t>(event.rank)];
    if (event.is_start) {
      own.push_back({PipelineStep::Kind::compute, event.task});
      continue;
    }
    const PlacedTask consumer = *schedule.consumer_of(event.rank, event.task);
    own.push_back({PipelineStep::Kind::send, event.task, consumer.rank});
    steps[static_cast<size_t>(consumer.rank)].push_back(
        {PipelineStep::Kind::receive, consumer.task, event.rank});
  }
  return steps;
}

std::vector<std::vector<size_t>> early_receives(const StepLists& all, int64_t rank) {
  const std::vector<PipelineStep>& steps = all.at(static_cast<size_t>(rank));
  const bool circle = form_a_circle(all);
  std::vector<std::vector<size_t>> starts(steps.size());
  std::map<int64_t, size_t> last;  // with each rank, in a circle with any: behind the last transfer
  std::map<std::pair<int64_t, TaskKind>, std::vector<size_t>> received;
  for (size_t i = 0; i < steps.size(); ++i) {
    const PipelineStep& step = steps[i];
    if (step.kind == PipelineStep::Kind::compute) continue;
    size_t& free_from = last[circle ? 0 : step.peer];
    if (step.kind == PipelineStep::Kind::receive) {
      std::vector<size_t>& earlier = received[{step.peer, step.task.kind}];
      size_t start = free_from;
      if (earlier.size() >= kInputsAhead) {
        const size_t consumed = consumed_at(steps, earlier[earlier.size() - kInputsAhead]);
        start = std::max(start, consumed + 1);
      }
      starts[std::min(start, i)].push_back(i);
      earlier.push_back(i);
    }
    free_from = i + 1;
  }
  return starts;
}

}  // namespace lockstep
