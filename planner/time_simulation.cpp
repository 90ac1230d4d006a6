#include "lockstep/planner/time_simulation.h"

#include <algorithm>
#include <deque>
#include <tuple>

#include "lockstep/core/check.h"
#include "lockstep/planner/transfer_times.h"

namespace lockstep {
namespace {

using EventKind = ProgramEvent::Kind;
using OperationKind = CollectiveOperation::Kind;

bool sends(const ProgramCall& call) { return call.operation.kind == OperationKind::send; }

/// (orbit, position from, position to, number)
using Name = std::tuple<uint32_t, int64_t, int64_t, uint32_t>;
/// (group, the message's other end or -1)
using Stream = std::pair<uint32_t, int64_t>;

/// An operation, which all its ranks start.
struct Meeting {
  uint32_t needed = 0;
  double seconds = 0;
  double occupancy = 0;
  std::vector<uint32_t> runs = {};  ///< that have started it
  bool done = false;
  double begin = 0, end = 0;
};

struct Started {
  uint32_t meeting = 0;
  uint32_t call = 0;
};

/// One rank of a class, as it runs.
struct Run {
  const RankProgram* program = nullptr;
  std::vector<double> kernel_seconds = {};
  size_t event = 0;
  size_t step = 0;       ///< the step that is under way
  size_t last_backward;  ///< event of the last step's last kernel of backward
  double time = 0;       ///< of the stream of kernels
  double host = 0;       ///< of the host
  double step_begin = 0;
  std::vector<double> before_waits = {};  ///< the stream's time before each of the device's waits
  std::vector<Started> operations = {};
  std::map<Stream, std::deque<std::pair<uint32_t, double>>> streams = {};  ///< meeting, ready at
  std::map<Stream, double> stream_end = {};
  std::map<std::tuple<uint32_t, int64_t, bool>, uint32_t> counts = {};
  RankTime spent = {};
};

class Simulation {
 public:
  Simulation(const JobProgram& job, const Machine& machine)
      : machine_(machine),
        groups_(job),
        transfers_(job, groups_, machine),
        is_due_(groups_.classes().size(), true) {
    for (uint32_t c = 0; c < groups_.classes().size(); ++c) {
      runs_.push_back(run_of(job, c));
      due_.push_back(c);
    }
    for (int64_t rank = 0; rank < job.world_size(); ++rank)
      ++runs_[groups_.class_of(rank)].spent.num_ranks;
  }

  StepTime run() {
    while (!due_.empty()) {
      const uint32_t next = due_.front();
      due_.pop_front();
      is_due_[next] = false;
      while (step(next)) {
      }
    }
    return result();
  }

 private:
  Run run_of(const JobProgram& job, uint32_t rank_class) const {
    const RankProgram& program = job.programs[groups_.classes()[rank_class].program];
    require<UsageError>(
        program.step_ends.size() >= 2 && !program.kernels.empty(),
        "program of rank {}: found {} steps with {} different kernels, allowed: two "
        "steps or more, with kernels",
        program.rank, program.step_ends.size(), program.kernels.size());
    Run run{.program = &program, .last_backward = 0};
    run.spent.rank = groups_.classes()[rank_class].first_rank;
    for (const ProgramKernel& kernel : program.kernels)
      run.kernel_seconds.push_back(machine_.seconds(kernel));
    for (size_t i = 0; i < program.step_ends.back(); ++i)
      if (program.events[i].kind == EventKind::kernel &&
          program.kernels[program.events[i].value].backward)
        run.last_backward = i;
    return run;
  }

  bool in_last_step(const Run& run) const { return run.step + 1 == run.program->step_ends.size(); }

  /// Returns whether the run advanced.
  bool step(uint32_t index) {
    Run& run = runs_[index];
    const std::vector<size_t>& ends = run.program->step_ends;
    while (run.step < ends.size() && run.event == ends[run.step]) end_step(run);
    if (run.step == ends.size()) return false;
    const ProgramEvent& event = run.program->events[run.event];
    switch (event.kind) {
      case EventKind::kernel:
        add_kernel(run, run.kernel_seconds[event.value]);
        break;
      case EventKind::start:
        start(index, event.value);
        break;
      case EventKind::wait:
        if (!wait(run, run.operations.at(event.value))) return false;
        break;
      case EventKind::host_wait:
        host_wait(run, event.value);
        break;
      case EventKind::connect:
      case EventKind::pair:
        break;
    }
    ++run.event;
    return true;
  }

  void end_step(Run& run) {
    if (++run.step + 1 == run.program->step_ends.size()) run.step_begin = run.time;
  }

  /// The host launches something; returns when the device can begin it.
  double launch(Run& run) {
    if (machine_.synchronous) {
      spend(run, machine_.launch_s);
      return run.time;
    }
    run.host += machine_.launch_s;
    return std::max(run.time, run.host);
  }

  /// Advances the stream of kernels, which is busy or waits for its host.
  void spend(Run& run, double seconds) {
    run.time += seconds;
    if (!in_last_step(run)) return;
    (run.event <= run.last_backward ? run.spent.compute_s : run.spent.optimizer_s) += seconds;
  }

  void add_kernel(Run& run, double seconds) { spend(run, launch(run) - run.time + seconds); }

  /// The host waits until the device is past the first `waits` of its waits.
  void host_wait(Run& run, uint32_t waits) {
    run.host =
        std::max(run.host, waits < run.before_waits.size() ? run.before_waits[waits] : run.time);
  }

  bool wait(Run& run, const Started& started) {
    const Meeting& meeting = meetings_[started.meeting];
    if (!meeting.done) return false;
    if (!run.program->calls[started.call].on_device && !machine_.synchronous) {
      run.host = std::max(run.host, meeting.end);
      return true;
    }
    if (run.program->calls[started.call].on_device) run.before_waits.push_back(run.time);
    // Kernels that ran meanwhile had only a part of the device.
    const double meanwhile = std::min(run.time, meeting.end) - meeting.begin;
    if (meanwhile > 0) spend(run, meeting.occupancy * meanwhile);
    if (meeting.end <= run.time) return true;
    if (in_last_step(run)) {
      const double exposed = meeting.end - std::max(run.time, meeting.begin);
      const uint32_t group = run.program->calls[started.call].group;
      run.spent.exposed_s[run.program->groups[group].name] += exposed;
    }
    run.time = meeting.end;
    return true;
  }

  void start(uint32_t index, uint32_t number) {
    Run& run = runs_[index];
    const ProgramCall& call = run.program->calls[number];
    const int64_t peer = call.is_message() ? call.operation.position : -1;
    const uint32_t meeting = meeting_of(run, index, number);
    run.operations.push_back({meeting, number});
    const double ready = launch(run);
    run.streams[{call.group, peer}].push_back({meeting, call.on_device ? ready : host_of(run)});
    meetings_[meeting].runs.push_back(index);
    streams_of_[meeting].push_back({call.group, peer});
    finish_from(meeting);
  }

  double host_of(const Run& run) const { return machine_.synchronous ? run.time : run.host; }

  uint32_t meeting_of(Run& run, uint32_t index, uint32_t call_number) {
    const ProgramCall& call = run.program->calls[call_number];
    const uint32_t orbit = groups_.classes()[index].orbits[call.group];
    const JobGroups::Orbit& known = groups_.orbits()[orbit];
    const int64_t own = run.program->groups[call.group].position, other = call.operation.position;
    const bool message = call.is_message();
    const int64_t from = !message ? -1 : sends(call) ? own : other;
    const int64_t to = !message ? -1 : sends(call) ? other : own;
    const uint32_t number = run.counts[{call.group, message ? other : -1, sends(call)}]++;
    const auto [entry, is_new] =
        names_.try_emplace({orbit, from, to, number}, static_cast<uint32_t>(meetings_.size()));
    if (is_new) {
      meetings_.push_back({.needed = message ? 2 : static_cast<uint32_t>(known.members.size())});
      streams_of_.emplace_back();
    }
    Meeting& meeting = meetings_[entry->second];
    // A receive says nothing about the link's load; the send of its pair does.
    const Machine::Transfer transfer = transfers_.of(index, call_number);
    meeting.seconds = std::max(meeting.seconds, transfer.seconds);
    meeting.occupancy = std::max(meeting.occupancy, transfer.occupancy);
    return entry->second;
  }

  /// Ends the operation if it can begin, then those after it.
  void finish_from(uint32_t first) {
    std::vector<uint32_t> open = {first};
    while (!open.empty()) {
      const uint32_t index = open.back();
      open.pop_back();
      Meeting& meeting = meetings_[index];
      if (meeting.done || meeting.runs.size() < meeting.needed || !is_first(index)) continue;
      for (size_t i = 0; i < meeting.runs.size(); ++i) {
        Run& run = runs_[meeting.runs[i]];
        const Stream& stream = streams_of_[index][i];
        meeting.begin =
            std::max({meeting.begin, run.streams[stream].front().second, run.stream_end[stream]});
      }
      meeting.end = meeting.begin + meeting.seconds;
      meeting.done = true;
      for (size_t i = 0; i < meeting.runs.size(); ++i) {
        Run& run = runs_[meeting.runs[i]];
        const Stream& stream = streams_of_[index][i];
        run.stream_end[stream] = meeting.end;
        auto& queue = run.streams[stream];
        queue.pop_front();
        if (!queue.empty()) open.push_back(queue.front().first);
        if (!is_due_[meeting.runs[i]]) {
          is_due_[meeting.runs[i]] = true;
          due_.push_back(meeting.runs[i]);
        }
      }
    }
  }

  /// Whether it comes first on the streams of its ranks.
  bool is_first(uint32_t index) {
    const Meeting& meeting = meetings_[index];
    for (size_t i = 0; i < meeting.runs.size(); ++i)
      if (runs_[meeting.runs[i]].streams[streams_of_[index][i]].front().first != index)
        return false;
    return true;
  }

  StepTime result() {
    StepTime result;
    double begin = 0, end = 0;
    for (const Run& run : runs_) {
      require<UsageError>(run.step == run.program->step_ends.size(),
                          "rank {} waits for ranks that do not come: see prove_order()",
                          run.spent.rank);
      begin = std::max(begin, run.step_begin);
      end = std::max(end, run.time);
    }
    result.step_s = end - begin;
    for (Run& run : runs_) {
      const double busy = run.spent.compute_s + run.spent.optimizer_s + run.spent.exposed_total_s();
      run.spent.bubble_s = std::max(0.0, result.step_s - busy);  // apart from rounding
      result.ranks.push_back(std::move(run.spent));
    }
    return result;
  }

  const Machine& machine_;
  const JobGroups groups_;
  TransferTimes transfers_;
  std::vector<Run> runs_;
  std::map<Name, uint32_t> names_;
  std::vector<Meeting> meetings_;
  std::vector<std::vector<Stream>> streams_of_;  ///< for each meeting, on each of its runs
  std::deque<uint32_t> due_;
  std::vector<bool> is_due_;
};

template <class Part>
double average(const std::vector<RankTime>& ranks, Part&& part) {
  double sum = 0;
  int64_t count = 0;
  for (const RankTime& rank : ranks) {
    sum += static_cast<double>(rank.num_ranks) * part(rank);
    count += rank.num_ranks;
  }
  return sum / static_cast<double>(std::max<int64_t>(count, 1));
}

}  // namespace

double RankTime::exposed_total_s() const {
  double sum = 0;
  for (const auto& [group, seconds] : exposed_s) sum += seconds;
  return sum;
}

double StepTime::compute_s() const {
  return average(ranks, [](const RankTime& rank) { return rank.compute_s; });
}

double StepTime::optimizer_s() const {
  return average(ranks, [](const RankTime& rank) { return rank.optimizer_s; });
}

double StepTime::exposed_s() const {
  return average(ranks, [](const RankTime& rank) { return rank.exposed_total_s(); });
}

double StepTime::bubble_s() const {
  return average(ranks, [](const RankTime& rank) { return rank.bubble_s; });
}

StepTime simulate_step(const JobProgram& job, const Machine& machine) {
  return Simulation(job, machine).run();
}

}  // namespace lockstep
