#include "lockstep/pipeline/simulation.h"

#include <algorithm>

#include "lockstep/core/check.h"
#include "lockstep/pipeline/schedule_check.h"
#include "lockstep/pipeline/task_table.h"

namespace lockstep {
namespace {

using Kind = PipelineStep::Kind;

constexpr int64_t kNotYet = -1;

/// The common part of both simulations: the times, how far each rank has come, and when each task's
/// output was ready.
class Simulation {
 public:
  Simulation(const PipelineSchedule& schedule, const TaskCost& cost)
      : schedule_(schedule),
        cost_(cost),
        done_(schedule.ranks.size()),
        free_(schedule.ranks.size()) {
    check_tasks(schedule);
    ended_.assign(schedule.ranks.size(), TaskTable<int64_t>(schedule, kNotYet));
    timeline_.ranks.resize(schedule.ranks.size());
  }

 protected:
  static size_t index(int64_t rank) { return static_cast<size_t>(rank); }

  void run_task(int64_t rank, const PipelineTask& task, int64_t ready) {
    const int64_t start = std::max(free_[index(rank)], ready), duration = cost_(rank, task);
    require<UsageError>(duration >= 1, "cost of task {} on rank {}: found {}, allowed: >= 1",
                        to_string(task), rank, duration);
    free_[index(rank)] = start + duration;
    ended_[index(rank)][task] = start + duration;
    timeline_.ranks[index(rank)].push_back({start, start + duration});
  }

  int64_t ended(const PlacedTask& placed) { return ended_[index(placed.rank)][placed.task]; }

  const PipelineSchedule& schedule_;
  const TaskCost& cost_;
  std::vector<size_t> done_;   ///< tasks or steps of each rank
  std::vector<int64_t> free_;  ///< time from which each rank is free
  std::vector<TaskTable<int64_t>> ended_;
  Timeline timeline_;
};

[[noreturn]] void fail_stuck(const std::vector<std::string>& stuck) {
  fail<UsageError>("the schedule deadlocks: {}", fmt::join(stuck, "; "));
}

/// Transfers block no rank.
class FreeSimulation : Simulation {
 public:
  FreeSimulation(const PipelineSchedule& schedule, const TaskCost& cost, int64_t transfer)
      : Simulation(schedule, cost), transfer_(transfer) {
    require<UsageError>(transfer >= 0, "transfer time: found {}, allowed: >= 0", transfer);
  }

  Timeline run() {
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank) to_visit_.push_back(rank);
    while (!to_visit_.empty()) {
      const int64_t rank = to_visit_.back();
      to_visit_.pop_back();
      advance(rank);
    }
    check_finished();
    return std::move(timeline_);
  }

 private:
  const std::vector<PipelineTask>& tasks(int64_t rank) const {
    return schedule_.ranks[index(rank)];
  }

  /// Runs tasks of `rank` until one has to wait.
  void advance(int64_t rank) {
    for (size_t& next = done_[index(rank)]; next < tasks(rank).size(); ++next) {
      const PipelineTask& task = tasks(rank)[next];
      int64_t ready = 0;
      if (const auto producer = schedule_.producer_of(rank, task)) {
        if (ended(*producer) == kNotYet) return;
        ready = ended(*producer) + (producer->rank == rank ? 0 : transfer_);
      }
      run_task(rank, task, ready);
      const auto consumer = schedule_.consumer_of(rank, task);
      if (consumer && consumer->rank != rank) to_visit_.push_back(consumer->rank);
    }
  }

  void check_finished() {
    std::vector<std::string> stuck;
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank) {
      const size_t next = done_[index(rank)];
      if (next == tasks(rank).size()) continue;
      const PipelineTask& task = tasks(rank)[next];
      const PlacedTask producer = *schedule_.producer_of(rank, task);
      stuck.push_back(fmt::format("rank {} waits at position {}, task {}, for {} of rank {}", rank,
                                  next, to_string(task), to_string(producer.task), producer.rank));
    }
    if (!stuck.empty()) fail_stuck(stuck);
  }

  int64_t transfer_;
  std::vector<int64_t> to_visit_;
};

/// Transfers block both sides.
class RendezvousSimulation : Simulation {
 public:
  RendezvousSimulation(const PipelineSchedule& schedule, const StepLists& steps,
                       const TaskCost& cost)
      : Simulation(schedule, cost), steps_(steps) {
    require<UsageError>(steps.size() == schedule.ranks.size(), "steps of {} ranks, schedule of {}",
                        steps.size(), schedule.ranks.size());
    received_.assign(steps.size(), TaskTable<char>(schedule, 0));
  }

  Timeline run() {
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank) check_order(rank);
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank) to_visit_.push_back(rank);
    while (!to_visit_.empty()) {
      const int64_t rank = to_visit_.back();
      to_visit_.pop_back();
      while (step(rank)) {
      }
    }
    check_finished();
    return std::move(timeline_);
  }

 private:
  const PipelineStep* next_step(int64_t rank) const {
    const auto& steps = steps_[index(rank)];
    return done_[index(rank)] < steps.size() ? &steps[done_[index(rank)]] : nullptr;
  }

  void check_order(int64_t rank) const {
    const auto& tasks = schedule_.ranks[index(rank)];
    size_t computed = 0;
    for (const PipelineStep& step : steps_[index(rank)]) {
      if (step.kind == Kind::compute) {
        require<UsageError>(computed < tasks.size() && tasks[computed] == step.task,
                            "rank {}: step {} is not task {} of the schedule", rank,
                            to_string(step), computed);
        ++computed;
      } else {
        require<UsageError>(step.peer >= 0 && step.peer < schedule_.pipeline() && step.peer != rank,
                            "rank {}: {}: no such peer", rank, to_string(step));
      }
    }
    require<UsageError>(computed == tasks.size(), "rank {}: {} of {} tasks stand in the steps",
                        rank, computed, tasks.size());
  }

  /// Takes the next step of `rank` if possible; returns whether it was.
  bool step(int64_t rank) {
    const PipelineStep* const next = next_step(rank);
    if (next == nullptr) return false;
    if (next->kind == Kind::compute) {
      compute(rank, next->task);
      ++done_[index(rank)];
      return true;
    }
    const PipelineStep* const other = next_step(next->peer);
    if (other == nullptr || other->kind == Kind::compute || other->peer != rank ||
        other->kind == next->kind)
      return false;
    const bool sends = next->kind == Kind::send;
    transfer(sends ? rank : next->peer, sends ? *next : *other, sends ? *other : *next);
    to_visit_.push_back(next->peer);
    return true;
  }

  void compute(int64_t rank, const PipelineTask& task) {
    const auto producer = schedule_.producer_of(rank, task);
    const bool has_input =
        !producer ||
        (producer->rank == rank ? ended(*producer) != kNotYet : received_[index(rank)][task] != 0);
    require<UsageError>(has_input, "rank {}: task {} starts before its input has come", rank,
                        to_string(task));
    run_task(rank, task, 0);
  }

  void transfer(int64_t sender, const PipelineStep& send, const PipelineStep& receive) {
    const int64_t receiver = send.peer;
    require<UsageError>(ended({sender, send.task}) != kNotYet,
                        "rank {}: {} comes before the task has run", sender, to_string(send));
    require<UsageError>(
        schedule_.consumer_of(sender, send.task) == PlacedTask{receiver, receive.task},
        "rank {}: '{}' meets '{}' of rank {}", sender, to_string(send), to_string(receive),
        receiver);
    received_[index(receiver)][receive.task] = 1;
    const int64_t now = std::max(free_[index(sender)], free_[index(receiver)]);
    for (const int64_t rank : {sender, receiver}) {
      free_[index(rank)] = now;
      ++done_[index(rank)];
    }
  }

  void check_finished() const {
    std::vector<std::string> stuck;
    for (int64_t rank = 0; rank < schedule_.pipeline(); ++rank)
      if (const PipelineStep* const next = next_step(rank))
        stuck.push_back(fmt::format("rank {} is stuck at step {}, {}", rank, done_[index(rank)],
                                    to_string(*next)));
    if (!stuck.empty()) fail_stuck(stuck);
  }

  const StepLists& steps_;
  std::vector<TaskTable<char>> received_;
  std::vector<int64_t> to_visit_;
};

}  // namespace

TaskCost reference_cost(const PipelineSchedule& schedule) {
  const int64_t backward = schedule.split_backward ? 1 : 2;
  return [backward](int64_t, const PipelineTask& task) {
    return task.kind == TaskKind::backward ? backward : 1;
  };
}

int64_t Timeline::makespan() const {
  int64_t end = 0;
  for (const auto& times : ranks)
    if (!times.empty()) end = std::max(end, times.back().end);
  return end;
}

int64_t Timeline::busy(int64_t rank) const {
  int64_t sum = 0;
  for (const TaskTime& time : ranks.at(static_cast<size_t>(rank))) sum += time.end - time.start;
  return sum;
}

double Timeline::bubble_fraction() const {
  const int64_t total = static_cast<int64_t>(ranks.size()) * makespan();
  int64_t idle = total;
  for (size_t rank = 0; rank < ranks.size(); ++rank) idle -= busy(static_cast<int64_t>(rank));
  return total == 0 ? 0 : static_cast<double>(idle) / static_cast<double>(total);
}

Timeline simulate(const PipelineSchedule& schedule, const TaskCost& cost, int64_t transfer) {
  return FreeSimulation(schedule, cost, transfer).run();
}

Timeline simulate_rendezvous(const PipelineSchedule& schedule, const StepLists& steps,
                             const TaskCost& cost) {
  return RendezvousSimulation(schedule, steps, cost).run();
}

}  // namespace lockstep
