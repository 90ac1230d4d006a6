#include "lockstep/parallel_state/order_simulation.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/parallel_state/operation_matching.h"

namespace lockstep {
namespace {

using EventKind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

// Kinds of meetings.
constexpr char kConnect = 'c', kPair = 'p', kFirstUse = 'f', kCollective = 'o', kMessage = 'm';

bool sends(const ProgramCall& call) { return call.operation.kind == OperationKind::send; }

}  // namespace

OrderSimulation::OrderSimulation(const JobProgram& job, const JobGroups& groups, Rules rules)
    : job_(job), groups_(groups), rules_(rules), is_due_(groups.classes().size(), false) {
  for (uint32_t c = 0; c < groups.classes().size(); ++c) {
    Run run{.rank_class = c, .program = &job.programs[groups.classes()[c].program]};
    prepare(run);
    runs_.push_back(std::move(run));
  }
}

uint32_t OrderSimulation::meeting(const Name& name, uint32_t needed,
                                  const std::vector<uint32_t>& classes) {
  const auto [entry, is_new] = names_.try_emplace(name, static_cast<uint32_t>(meetings_.size()));
  if (is_new) meetings_.push_back({needed, 0, &classes});
  return entry->second;
}

uint32_t OrderSimulation::group_meeting(const Run& run, char kind, uint32_t group,
                                        uint32_t number) {
  const uint32_t index = groups_.classes()[run.rank_class].orbits[group];
  const JobGroups::Orbit& orbit = groups_.orbits()[index];
  return meeting({kind, index, -1, -1, number}, static_cast<uint32_t>(orbit.members.size()),
                 orbit.rank_classes);
}

/// The meeting of a message, by direction; a pair has one for both directions.
uint32_t OrderSimulation::message_meeting(const Run& run, char kind, const ProgramCall& call,
                                          uint32_t number) {
  const uint32_t index = groups_.classes()[run.rank_class].orbits[call.group];
  const int64_t own = run.program->groups[call.group].position, other = call.operation.position;
  const auto& places = groups_.orbits()[index].by_position;
  const int64_t from = sends(call) ? own : other, to = sends(call) ? other : own;
  const auto found = names_.find({kind, index, from, to, number});
  if (found != names_.end()) return found->second;
  pairs_.push_back(
      {places[static_cast<size_t>(from)].rank_class, places[static_cast<size_t>(to)].rank_class});
  return meeting({kind, index, from, to, number}, 2, pairs_.back());
}

void OrderSimulation::prepare(Run& run) {
  std::map<std::tuple<uint32_t, int64_t, bool>, uint32_t> counts;
  for (const ProgramEvent& event : run.program->events) {
    if (event.kind != EventKind::start) continue;
    const ProgramCall& call = run.program->calls[event.value];
    Operation operation{.call = event.value};
    operation.streamed = rules_ == Rules::nccl && call.on_device;
    if (call.is_message()) {
      uint32_t& number = counts[{call.group, call.operation.position, sends(call)}];
      operation.meeting = message_meeting(run, kMessage, call, number++);
    } else {
      uint32_t& number = counts[{call.group, -1, false}];
      operation.meeting = group_meeting(run, kCollective, call.group, number++);
      operation.chained = operation.streamed;
    }
    run.operations.push_back(operation);
  }
}

std::optional<OrderVerdict> OrderSimulation::run() {
  for (uint32_t c = 0; c < runs_.size(); ++c) due_.push_back(c), is_due_[c] = true;
  while (!due_.empty()) {
    const uint32_t next = due_.front();
    due_.pop_front();
    is_due_[next] = false;
    advance(runs_[next]);
  }
  const bool finished = std::all_of(runs_.begin(), runs_.end(), [&](const Run& run) {
    return run.finished() && std::all_of(run.operations.begin(), run.operations.end(),
                                         [&](const Operation& o) { return is_done(o); });
  });
  if (finished) return std::nullopt;
  return explain();
}

void OrderSimulation::arrive(uint32_t index) {
  Meeting& meeting = meetings_[index];
  ++meeting.arrived;
  if (!meeting.over()) return;
  for (const uint32_t c : *meeting.classes)
    if (!is_due_[c]) due_.push_back(c), is_due_[c] = true;
}

void OrderSimulation::advance(Run& run) {
  for (bool moved = true; moved;) {
    moved = false;
    while (!run.finished() && step_host(run)) moved = true;
    if (step_streams(run)) moved = true;
  }
}

/// Returns whether the host may go on.
bool OrderSimulation::hold(Run& run, uint32_t index) {
  if (!run.held) {
    run.held = true;
    run.came.insert(index);
    arrive(index);
  }
  if (!is_over(index)) return false;
  run.held = false;
  return true;
}

bool OrderSimulation::step_host(Run& run) {
  const ProgramEvent& event = run.program->events[run.event];
  bool passes = true;
  switch (event.kind) {
    case EventKind::connect:
      passes = hold(run, group_meeting(run, kConnect, event.value));
      break;
    case EventKind::pair: {
      if (rules_ == Rules::gloo) break;
      const ProgramCall& call = run.program->calls[event.value];
      // A pair that is already connected does not wait.
      if (run.used.contains({call.group, call.operation.position, true}) &&
          run.used.contains({call.group, call.operation.position, false}))
        break;
      passes = hold(run, message_meeting(run, kPair, call));
      if (passes)
        for (const bool way : {true, false})
          run.used.insert({call.group, call.operation.position, way});
      break;
    }
    case EventKind::start:
      passes = start(run);
      break;
    case EventKind::wait: {
      const Operation& operation = run.operations.at(event.value);
      if (operation.streamed)
        run.waits.push_back(event.value);
      else
        passes = is_done(operation);
      break;
    }
    case EventKind::host_wait:
      passes =
          rules_ == Rules::gloo || run.waited >= std::min<size_t>(event.value, run.waits.size());
      break;
    case EventKind::kernel:
      break;
  }
  if (passes) ++run.event;
  return passes;
}

/// The meeting that blocks the host at the first use of a communicator or a direction.
std::optional<uint32_t> OrderSimulation::first_use(Run& run, const ProgramCall& call) {
  if (!call.is_message()) {
    if (run.used.contains({call.group, -1, false})) return std::nullopt;
    return group_meeting(run, kFirstUse, call.group);
  }
  if (run.used.contains({call.group, call.operation.position, sends(call)})) return std::nullopt;
  return message_meeting(run, kFirstUse, call);
}

bool OrderSimulation::start(Run& run) {
  const uint32_t number = run.started;
  Operation& operation = run.operations[number];
  const ProgramCall& call = run.program->calls[operation.call];
  const int64_t peer = call.is_message() ? call.operation.position : -1;
  if (operation.streamed) {
    const auto first = first_use(run, call);
    if (first && !hold(run, *first)) return false;
    run.used.insert({call.group, peer, call.is_message() && sends(call)});
  }
  ++run.started;
  operation.waits_before = static_cast<uint32_t>(run.waits.size());
  // Host messages of the two directions are kept apart by a number that is no position.
  const int64_t stream = operation.streamed || !sends(call) ? peer : -2 - peer;
  run.streams[{call.group * 2 + (operation.streamed ? 1 : 0), stream}].push_back(number);
  if (operation.chained) run.chain.push_back(number);
  return true;
}

bool OrderSimulation::may_post(const Run& run, uint32_t number) const {
  const Operation& operation = run.operations[number];
  if (!operation.streamed) return true;
  return run.waited >= operation.waits_before &&
         (!operation.chained || run.chain.front() == number);
}

bool OrderSimulation::step_streams(Run& run) {
  bool moved = false;
  for (; run.waited < run.waits.size() && is_done(run.operations[run.waits[run.waited]]);
       ++run.waited)
    moved = true;
  for (auto& [key, stream] : run.streams)
    while (!stream.empty()) {
      const uint32_t number = stream.front();
      Operation& operation = run.operations[number];
      if (!operation.posted && may_post(run, number)) {
        operation.posted = true;
        moved = true;
        arrive(operation.meeting);
      }
      if (!operation.posted || !is_done(operation)) break;
      stream.pop_front();
      if (operation.chained) run.chain.pop_front();
      moved = true;
    }
  return moved;
}

}  // namespace lockstep
