#include "lockstep/planner/simulated_rank.h"

#include <algorithm>

#include "lockstep/core/check.h"

namespace lockstep {

SimulatedRank::SimulatedRank(const RankProgram& program, int64_t first_rank, const Machine& machine)
    : program(&program) {
  require<UsageError>(program.step_ends.size() >= 2 && !program.kernels.empty(),
                      "program of rank {}: found {} steps with {} different kernels, allowed: two "
                      "steps or more, with kernels",
                      program.rank, program.step_ends.size(), program.kernels.size());
  spent.rank = first_rank;
  for (const ProgramKernel& kernel : program.kernels)
    kernel_seconds.push_back(machine.seconds(kernel));
  for (size_t i = 0; i < program.step_ends.back(); ++i)
    if (program.events[i].kind == ProgramEvent::Kind::kernel &&
        program.kernels[program.events[i].value].backward)
      last_backward_ = i;
}

const ProgramEvent* SimulatedRank::next_event() {
  const std::vector<size_t>& ends = program->step_ends;
  while (step_ < ends.size() && event == ends[step_])
    if (++step_ + 1 == ends.size()) step_begin = time;
  return step_ == ends.size() ? nullptr : &program->events[event];
}

void SimulatedRank::add_work(double seconds, size_t event) {
  if (in_last_step()) (event <= last_backward_ ? spent.compute_s : spent.optimizer_s) += seconds;
}

void SimulatedRank::add_exposed(const Started& started, double seconds) {
  if (in_last_step())
    spent.exposed_s[program->groups[program->calls[started.call].group].name] += seconds;
}

StepTime step_time(std::vector<SimulatedRank*> ranks, const JobProgram& job,
                   const JobGroups& groups) {
  for (int64_t rank = 0; rank < job.world_size(); ++rank)
    ++ranks[groups.class_of(rank)]->spent.num_ranks;
  StepTime result;
  double begin = 0, end = 0;
  for (const SimulatedRank* rank : ranks) {
    require<UsageError>(rank->has_ended(),
                        "rank {} waits for ranks that do not come: see prove_order()",
                        rank->spent.rank);
    begin = std::max(begin, rank->step_begin);
    end = std::max(end, rank->time);
  }
  result.step_s = end - begin;
  for (SimulatedRank* rank : ranks) {
    RankTime& spent = rank->spent;
    const double busy = spent.compute_s + spent.optimizer_s + spent.exposed_total_s();
    spent.bubble_s = std::max(0.0, result.step_s - busy);  // apart from rounding
    result.ranks.push_back(std::move(spent));
  }
  return result;
}

}  // namespace lockstep
