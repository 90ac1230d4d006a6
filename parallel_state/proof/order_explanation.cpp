// Explains which rank waits for which if a job does not finish.

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/operation_matching.h"
#include "lockstep/parallel_state/order_simulation.h"

namespace lockstep {

std::string OrderSimulation::call_text(const Run& run, const ProgramCall& call) const {
  return describe(job_, groups_, rank_of(run), call);
}

/// The operation at which the rank is: the given one, or one that must be done first.
OrderSimulation::Place OrderSimulation::place_of_operation(const Run& run, uint32_t number) const {
  for (;;) {
    const Operation& operation = run.operations[number];
    if (operation.posted)
      return {call_text(run, run.program->calls[operation.call]), operation.meeting};
    uint32_t before = number;
    if (run.waited < operation.waits_before) before = run.waits[run.waited];
    for (const auto& [key, stream] : run.streams) {
      const auto found = std::find(stream.begin(), stream.end(), number);
      if (before == number && found != stream.end()) before = stream.front();
    }
    if (before == number && operation.chained) before = run.chain.front();
    if (before == number)
      return {call_text(run, run.program->calls[operation.call]), operation.meeting};
    number = before;
  }
}

/// The place that the rank has reached; unset if it has done everything.
std::optional<OrderSimulation::Place> OrderSimulation::place_of(Run& run) {
  if (run.finished()) {
    for (uint32_t number = 0; number < run.operations.size(); ++number)
      if (!is_done(run.operations[number])) return place_of_operation(run, number);
    return std::nullopt;
  }
  const ProgramEvent& event = run.program->events[run.event];
  using Kind = ProgramEvent::Kind;
  switch (event.kind) {
    case Kind::connect: {
      const std::string group = group_text(run.program->groups[event.value].name,
                                           groups_.ranks_of(rank_of(run), event.value));
      return Place{fmt::format("rank {}: connecting group {}", rank_of(run), group),
                   group_meeting(run, 'c', event.value)};
    }
    case Kind::pair: {
      const ProgramCall& call = run.program->calls[event.value];
      return Place{fmt::format("rank {}: connecting with rank {} over {}", rank_of(run),
                               groups_.ranks_of(rank_of(run), call.group)
                                   .at(static_cast<size_t>(call.operation.position)),
                               run.program->groups[call.group].name),
                   message_meeting(run, 'p', call)};
    }
    case Kind::start: {
      const ProgramCall& call = run.program->calls[event.value];
      return Place{call_text(run, call) + ", the first use", *first_use(run, call)};
    }
    case Kind::wait:
      return place_of_operation(run, event.value);
    case Kind::kernel:
    case Kind::host_wait:
      break;
  }
  return place_of_operation(run, run.waits[run.waited]);
}

bool OrderSimulation::has_come(const Run& run, uint32_t index) const {
  if (run.came.contains(index)) return true;
  return std::any_of(run.operations.begin(), run.operations.end(),
                     [&](const Operation& o) { return o.meeting == index && o.posted; });
}

OrderSimulation::Run& OrderSimulation::one_that_is_missing(uint32_t index) {
  const std::vector<uint32_t>& classes = *meetings_[index].classes;
  const auto missing = std::find_if(classes.begin(), classes.end(),
                                    [&](uint32_t c) { return !has_come(runs_[c], index); });
  return runs_[missing == classes.end() ? classes.front() : *missing];
}

OrderVerdict OrderSimulation::explain() {
  OrderVerdict verdict{.reason = OrderVerdict::Reason::deadlock,
                       .rules = rules_ == Rules::nccl ? "NCCL" : "Gloo"};
  std::vector<std::pair<uint32_t, std::string>> path;  // class and text
  const auto stuck =
      std::find_if(runs_.begin(), runs_.end(), [&](Run& run) { return place_of(run).has_value(); });
  for (Run* run = &*stuck;;) {
    const auto place = place_of(*run);
    const auto before = std::find_if(
        path.begin(), path.end(), [&](const auto& step) { return step.first == run->rank_class; });
    if (before != path.end()) {
      path.erase(path.begin(), before);  // the way to the circle is no part of it
      break;
    }
    path.emplace_back(run->rank_class,
                      place ? place->text : fmt::format("rank {}: has ended", rank_of(*run)));
    if (!place) {
      verdict.reason = OrderVerdict::Reason::mismatch;
      break;
    }
    run = &one_that_is_missing(place->meeting);
  }
  for (const auto& [rank_class, text] : path) {
    verdict.ranks.push_back(rank_of(runs_[rank_class]));
    verdict.operations.push_back(text);
  }
  return verdict;
}

}  // namespace lockstep
