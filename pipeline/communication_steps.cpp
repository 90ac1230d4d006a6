#include "lockstep/pipeline/communication_steps.h"

#include <algorithm>
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

}  // namespace lockstep
