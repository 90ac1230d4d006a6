#include "lockstep/planner/shared_cores.h"

#include <algorithm>
#include <deque>
#include <limits>
#include <map>

#include "lockstep/core/check.h"
#include "lockstep/planner/job_operations.h"
#include "lockstep/planner/simulated_rank.h"

namespace lockstep {
namespace {

constexpr double kNever = std::numeric_limits<double>::infinity();
constexpr double kRounding = 1e-15;  // seconds that are left of work that is done

struct SharedRun : SimulatedRank {
  using SimulatedRank::SimulatedRank;
  bool works = false;  ///< on `event`, which ends with the work
  double left = 0;     ///< seconds of a core until then
  const Started* awaited = nullptr;
  std::map<JobOperations::Stream, std::deque<uint32_t>> streams = {};
};

struct RunningTransfer {
  bool running = false, done = false;
  double left = 0;  ///< seconds
};

class SharedSimulation {
 public:
  SharedSimulation(const JobProgram& job, const Machine& machine)
      : job_(job), machine_(machine), groups_(job), operations_(job, groups_, machine) {
    for (const JobGroups::RankClass& each : groups_.classes())
      runs_.emplace_back(job.programs[each.program], each.first_rank, machine);
    num_ranks_.resize(runs_.size());
    for (int64_t rank = 0; rank < job.world_size(); ++rank) ++num_ranks_[groups_.class_of(rank)];
  }

  StepTime run() {
    do {
      for (uint32_t i = 0; i < runs_.size(); ++i) advance(i);
    } while (pass_time());
    std::vector<SimulatedRank*> ranks;
    for (SharedRun& run : runs_) ranks.push_back(&run);
    return step_time(std::move(ranks), job_, groups_);
  }

 private:
  /// Goes on to the next work or to an operation that is not done.
  void advance(uint32_t index) {
    SharedRun& run = runs_[index];
    if (run.has_ended()) return;
    run.time = now_;
    while (!run.works) {
      const ProgramEvent* const event = run.next_event();
      if (!event) return;
      if (event->kind == ProgramEvent::Kind::kernel || event->kind == ProgramEvent::Kind::start) {
        run.works = true;
        run.left = machine_.launch_s;
        if (event->kind == ProgramEvent::Kind::kernel) run.left += run.kernel_seconds[event->value];
        return;
      }
      if (event->kind == ProgramEvent::Kind::wait) {
        run.awaited = &run.operations.at(event->value);
        if (!transfers_[run.awaited->operation].done) return;
        run.awaited = nullptr;
      }
      ++run.event;
    }
  }

  /// Until something is done; returns whether anything was.
  bool pass_time() {
    const double wanted = load(), cores = static_cast<double>(machine_.cores);
    const double share = wanted > cores ? cores / wanted : 1;
    double seconds = kNever;
    for (const SharedRun& run : runs_)
      if (run.works) seconds = std::min(seconds, run.left / share);
    for (const uint32_t number : running_)
      seconds = std::min(seconds, transfers_[number].left / share);
    if (seconds == kNever) return false;
    now_ += seconds;
    for (SharedRun& run : runs_) pass_time(run, seconds, seconds * share);
    const std::vector<uint32_t> running = running_;
    for (const uint32_t number : running) {
      transfers_[number].left -= seconds * share;
      if (transfers_[number].left < kRounding) finish(number);
    }
    for (uint32_t i = 0; i < runs_.size(); ++i)
      if (runs_[i].works && runs_[i].left < kRounding) end_work(i);
    return true;
  }

  void pass_time(SharedRun& run, double seconds, double work) {
    if (run.works) {
      run.left -= work;
      run.add_work(seconds, run.event);
    } else if (run.awaited && transfers_[run.awaited->operation].running) {
      run.add_exposed(*run.awaited, seconds);
    }
  }

  /// The cores that would be busy if the host had enough of them.
  double load() const {
    double sum = 0;
    for (size_t i = 0; i < runs_.size(); ++i)
      if (runs_[i].works) sum += num_ranks_[i];
    for (const uint32_t number : running_) {
      const JobOperations::Operation& operation = operations_[number];
      for (const auto& [index, stream] : operation.started) {
        const SharedRun& run = runs_[index];
        const bool waits = run.awaited && run.awaited->operation == number;
        sum += num_ranks_[index] * (waits ? 1 : operation.cost.occupancy);
      }
    }
    return sum;
  }

  void end_work(uint32_t index) {
    SharedRun& run = runs_[index];
    const ProgramEvent& event = run.program->events[run.event];
    run.works = false;
    ++run.event;
    if (event.kind != ProgramEvent::Kind::start) return;
    const uint32_t number = operations_.start(index, event.value);
    if (number == transfers_.size()) transfers_.emplace_back();
    run.operations.push_back({number, event.value, run.event - 1});
    run.streams[operations_[number].started.back().second].push_back(number);
    begin(number);
  }

  /// Begins the operation if all its ranks have started it and it comes first on their streams.
  void begin(uint32_t number) {
    const JobOperations::Operation& operation = operations_[number];
    if (!operation.complete() || transfers_[number].running) return;
    for (const auto& [index, stream] : operation.started)
      if (runs_[index].streams[stream].front() != number) return;
    transfers_[number].running = true;
    transfers_[number].left = operation.cost.seconds;
    running_.push_back(number);
  }

  void finish(uint32_t number) {
    transfers_[number] = {.running = false, .done = true};
    std::erase(running_, number);
    for (const auto& [index, stream] : operations_[number].started) {
      std::deque<uint32_t>& queue = runs_[index].streams[stream];
      queue.pop_front();
      if (!queue.empty()) begin(queue.front());
    }
  }

  const JobProgram& job_;
  const Machine& machine_;
  const JobGroups groups_;
  JobOperations operations_;
  std::vector<double> num_ranks_;  ///< of each run's class
  std::vector<SharedRun> runs_;
  std::vector<RunningTransfer> transfers_;  ///< of each operation
  std::vector<uint32_t> running_;
  double now_ = 0;
};

}  // namespace

void check_shared_cores(const Machine& machine, int64_t world_size) {
  require<ConfigError>(machine.cores == 0 || world_size <= machine.ranks_per_host,
                       "machine \"{}\": ranks share cores, which needs a job on one host: found {} "
                       "ranks, allowed: 1 to {}, ranks_per_host",
                       machine.name, world_size, machine.ranks_per_host);
}

StepTime simulate_shared_cores(const JobProgram& job, const Machine& machine) {
  check_shared_cores(machine, job.world_size());
  return SharedSimulation(job, machine).run();
}

}  // namespace lockstep
