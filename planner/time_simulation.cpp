#include "lockstep/planner/time_simulation.h"

#include <algorithm>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "lockstep/planner/job_operations.h"
#include "lockstep/planner/shared_cores.h"
#include "lockstep/planner/simulated_rank.h"

namespace lockstep {
namespace {

using EventKind = ProgramEvent::Kind;

using Stream = JobOperations::Stream;

/// When an operation runs.
struct Meeting {
  bool done = false;
  double begin = 0, end = 0;
};

using Started = SimulatedRank::Started;

struct Run : SimulatedRank {
  using SimulatedRank::SimulatedRank;
  double host = 0;                        ///< time of the host
  std::optional<Started> held_host = {};  ///< the operation that the host waited for longest
  std::deque<std::pair<double, double>> idle = {};  ///< when the stream of kernels ran none
  std::vector<double> before_waits = {};  ///< the stream's time before each of the device's waits
  std::map<Stream, std::deque<std::pair<uint32_t, double>>> streams = {};  ///< meeting, ready at
  std::map<Stream, double> stream_end = {};
};

class Simulation {
 public:
  Simulation(const JobProgram& job, const Machine& machine)
      : job_(job),
        machine_(machine),
        groups_(job),
        operations_(job, groups_, machine),
        is_due_(groups_.classes().size(), true) {
    for (const JobGroups::RankClass& each : groups_.classes()) {
      due_.push_back(static_cast<uint32_t>(runs_.size()));
      runs_.emplace_back(job.programs[each.program], each.first_rank, machine);
    }
  }

  StepTime run() {
    while (!due_.empty()) {
      const uint32_t next = due_.front();
      due_.pop_front();
      is_due_[next] = false;
      while (step(next)) {
      }
    }
    std::vector<SimulatedRank*> ranks;
    for (Run& run : runs_) ranks.push_back(&run);
    return step_time(std::move(ranks), job_, groups_);
  }

 private:
  /// Returns whether the run advanced.
  bool step(uint32_t index) {
    Run& run = runs_[index];
    const ProgramEvent* const event = run.next_event();
    if (!event) return false;
    switch (event->kind) {
      case EventKind::kernel:
        add_kernel(run, run.kernel_seconds[event->value]);
        break;
      case EventKind::start:
        start(index, event->value);
        break;
      case EventKind::wait:
        if (!wait(run, run.operations.at(event->value))) return false;
        break;
      case EventKind::host_wait:
        host_wait(run, event->value);
        break;
      case EventKind::connect:
      case EventKind::pair:
        break;
    }
    ++run.event;
    return true;
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

  /// Advances the stream of kernels, which is busy.
  void spend(Run& run, double seconds) {
    run.time += seconds;
    run.add_work(seconds, run.event);
  }

  /// The device has nothing to run until its host launches something at `ready`. What the host
  /// waited for other ranks is not the device's work.
  void idle_until(Run& run, double ready) {
    if (ready <= run.time) return;
    run.idle.emplace_back(run.time, ready);
    if (run.held_host) {
      const Meeting& meeting = meetings_[run.held_host->operation];
      const double end = std::min(ready, meeting.end);
      if (const double begin = std::max(run.time, meeting.begin); begin < end)
        run.add_exposed(*run.held_host, end - begin);
      run.time = std::max(run.time, end);
    }
    spend(run, ready - run.time);
  }

  void add_kernel(Run& run, double seconds) {
    idle_until(run, launch(run));
    spend(run, seconds);
  }

  /// The host waits until the device is past the first `waits` of its waits.
  void host_wait(Run& run, uint32_t waits) {
    run.host =
        std::max(run.host, waits < run.before_waits.size() ? run.before_waits[waits] : run.time);
  }

  bool wait(Run& run, const Started& started) {
    const Meeting& meeting = meetings_[started.operation];
    if (!meeting.done) return false;
    if (!run.program->calls[started.call].on_device && !machine_.synchronous) {
      if (meeting.end > run.host) run.held_host = started;
      run.host = std::max(run.host, meeting.end);
      return true;
    }
    if (run.program->calls[started.call].on_device) run.before_waits.push_back(run.time);
    // Kernels that ran meanwhile had only a part of the device.
    const double slowed = busy_seconds(run, meeting.begin, std::min(run.time, meeting.end)) *
                          operations_[started.operation].cost.occupancy;
    run.time += slowed;
    run.add_work(slowed, started.event);
    if (meeting.end <= run.time) return true;
    run.add_exposed(started, meeting.end - std::max(run.time, meeting.begin));
    run.idle.emplace_back(run.time, meeting.end);
    run.time = meeting.end;
    return true;
  }

  /// Of the stream of kernels from `begin` to `end`.
  static double busy_seconds(const Run& run, double begin, double end) {
    if (end <= begin) return 0;
    double seconds = end - begin;
    for (auto one = run.idle.rbegin(); one != run.idle.rend() && one->second > begin; ++one)
      seconds -= std::max(0.0, std::min(end, one->second) - std::max(begin, one->first));
    return seconds;
  }

  void start(uint32_t index, uint32_t number) {
    Run& run = runs_[index];
    const ProgramCall& call = run.program->calls[number];
    const uint32_t operation = operations_.start(index, number);
    if (operation == meetings_.size()) meetings_.emplace_back();
    run.operations.push_back({operation, number, run.event});
    const double ready = launch(run);
    const Stream& stream = operations_[operation].started.back().second;
    run.streams[stream].push_back({operation, call.on_device ? ready : host_of(run)});
    finish_from(operation);
  }

  double host_of(const Run& run) const { return machine_.synchronous ? run.time : run.host; }

  /// Ends the operation if it can begin, then those after it.
  void finish_from(uint32_t first) {
    std::vector<uint32_t> open = {first};
    while (!open.empty()) {
      const uint32_t index = open.back();
      open.pop_back();
      Meeting& meeting = meetings_[index];
      const JobOperations::Operation& operation = operations_[index];
      if (meeting.done || !operation.complete() || !is_first(operation, index)) continue;
      for (const auto& [rank_class, stream] : operation.started) {
        Run& run = runs_[rank_class];
        meeting.begin =
            std::max({meeting.begin, run.streams[stream].front().second, run.stream_end[stream]});
      }
      meeting.end = meeting.begin + operation.cost.seconds;
      meeting.done = true;
      for (const auto& [rank_class, stream] : operation.started) {
        Run& run = runs_[rank_class];
        run.stream_end[stream] = meeting.end;
        auto& queue = run.streams[stream];
        queue.pop_front();
        if (!queue.empty()) open.push_back(queue.front().first);
        if (!is_due_[rank_class]) {
          is_due_[rank_class] = true;
          due_.push_back(rank_class);
        }
      }
    }
  }

  /// Whether it comes first on the streams of its ranks.
  bool is_first(const JobOperations::Operation& operation, uint32_t index) {
    return std::all_of(operation.started.begin(), operation.started.end(), [&](const auto& one) {
      return runs_[one.first].streams[one.second].front().first == index;
    });
  }

  const JobProgram& job_;
  const Machine& machine_;
  const JobGroups groups_;
  JobOperations operations_;
  std::vector<Run> runs_;
  std::vector<Meeting> meetings_;
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
  return machine.cores > 0 ? simulate_shared_cores(job, machine) : Simulation(job, machine).run();
}

}  // namespace lockstep
