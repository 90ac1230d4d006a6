// Programs written by hand, on machines with round numbers.

#include "lockstep/planner/time_simulation.h"

#include <gtest/gtest.h>

#include <functional>
#include <map>

#include "lockstep/core/error.h"
#include "lockstep/pipeline/communication_steps.h"
#include "lockstep/pipeline/simulation.h"
#include "lockstep/tests/planner/written_programs.h"

namespace lockstep {
namespace {

using namespace testing;

using Kind = CollectiveOperation::Kind;

/// Two ranks in two groups.
StepTime time_of(const Machine& machine, const std::function<void(int64_t rank, Writer&)>& step) {
  return simulate_step(job_of(
                           2,
                           [](int64_t, Writer& writer) {
                             writer.group("dp", {0, 1});
                             writer.group("tp", {0, 1});
                           },
                           step),
                       machine);
}

void expect_parts(const RankTime& rank, double compute, double optimizer, double exposed,
                  double bubble) {
  EXPECT_DOUBLE_EQ(rank.compute_s, compute);
  EXPECT_DOUBLE_EQ(rank.optimizer_s, optimizer);
  EXPECT_DOUBLE_EQ(rank.exposed_total_s(), exposed);
  EXPECT_DOUBLE_EQ(rank.bubble_s, bubble);
}

TEST(TimeSimulation, AKernelTakesItsProductsAndItsBytes) {
  const StepTime time = time_of(machine_of(2), [](int64_t, Writer& writer) {
    writer.kernel(10, true, 7);
    writer.kernel(4, false);
  });
  EXPECT_DOUBLE_EQ(time.step_s, 21);
  expect_parts(time.ranks.at(0), 17, 4, 0, 0);
}

TEST(TimeSimulation, WhatIsWaitedForAtOnceIsExposed) {
  // All-reduce of 6 bytes on two ranks: each sends 6.
  const auto step = [](int64_t, Writer& writer) {
    writer.kernel(10);
    writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 6));
    writer.kernel(5, false);
  };
  const StepTime inside = time_of(machine_of(2), step);
  EXPECT_DOUBLE_EQ(inside.step_s, 10 + 12 + 5);
  expect_parts(inside.ranks.at(0), 10, 5, 12, 0);
  EXPECT_DOUBLE_EQ(inside.ranks.at(0).exposed_s.at("dp"), 12);
  EXPECT_DOUBLE_EQ(time_of(machine_of(1), step).step_s, 10 + 18 + 5);
  EXPECT_DOUBLE_EQ(time_of(machine_of(1, /*latency=*/100), step).step_s, 10 + 218 + 5);
}

TEST(TimeSimulation, WhatKernelsCoverIsNot) {
  const StepTime time = time_of(machine_of(2), [](int64_t, Writer& writer) {
    const uint32_t first = writer.start(0, {.kind = Kind::all_reduce}, 2);
    const uint32_t second = writer.start(0, {.kind = Kind::all_reduce}, 3);
    writer.kernel(8);
    writer.wait(first);
    writer.wait(second);  // one stream: they run one after the other, 4 + 6
  });
  EXPECT_DOUBLE_EQ(time.step_s, 10);
  expect_parts(time.ranks.at(0), 8, 0, 2, 0);
}

TEST(TimeSimulation, ASlowRankIsABubbleOfTheOthers) {
  const StepTime time = time_of(machine_of(2), [](int64_t rank, Writer& writer) {
    writer.kernel(rank == 0 ? 3 : 11);
    writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 2));
  });
  EXPECT_DOUBLE_EQ(time.step_s, 15);
  ASSERT_EQ(time.ranks.size(), 2u);
  expect_parts(time.ranks[0], 3, 0, 4, 8);
  expect_parts(time.ranks[1], 11, 0, 4, 0);
  EXPECT_DOUBLE_EQ(time.compute_s(), 7);
  EXPECT_DOUBLE_EQ(time.bubble_s(), 4);
}

TEST(TimeSimulation, ADeviceWaitsForItsHost) {
  Machine machine = machine_of(2);
  machine.launch_s = 5;
  // The host launches at 5, 10, 15 and 20 of each step. In the first step kernels run from 5 to 15,
  // 16 and 17, and from 20 to 21; in the second one from 25 to 35, 36 and 37, and from 40 to 41.
  const StepTime late = time_of(machine, [](int64_t, Writer& writer) {
    for (const int64_t bytes : {10, 1, 1, 1}) writer.kernel(bytes);
  });
  EXPECT_DOUBLE_EQ(late.step_s, 20);
  expect_parts(late.ranks.at(0), 20, 0, 0, 0);
  // Steps end at 31 and 61: kernels run 5 to 25, 30 to 31, 35 to 55, 60 to 61.
  const StepTime read = time_of(machine, [](int64_t, Writer& writer) {
    writer.kernel(20);
    writer.host_wait(0);
    writer.kernel(1);
  });
  EXPECT_DOUBLE_EQ(read.step_s, 30);
}

TEST(TimeSimulation, AHostWaitsOnlyForWhatItReads) {
  Machine machine = machine_of(2);
  machine.launch_s = 5;
  std::vector<uint32_t> steps(2);
  // The host reads what the device had before it waited. In the first step the device waits from 6
  // to 22, computes until 42, and the host has launched the last kernel by 20. In the second one
  // the host is behind the device at 44, but launches the last kernel long before 76.
  const StepTime time = time_of(machine, [&](int64_t rank, Writer& writer) {
    writer.kernel(1);
    writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 6));
    writer.kernel(20);
    writer.host_wait(steps[static_cast<size_t>(rank)]++);
    writer.kernel(1);
  });
  EXPECT_DOUBLE_EQ(time.step_s, 34);
  expect_parts(time.ranks.at(0), 22, 0, 12, 0);
}

TEST(TimeSimulation, ASynchronousMachineLaunchesAndRunsInTurn) {
  Machine machine = machine_of(2);
  machine.launch_s = 5;
  machine.synchronous = true;
  const StepTime time = time_of(machine, [](int64_t, Writer& writer) {
    writer.kernel(10);
    writer.kernel(1);
    writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 6));
  });
  EXPECT_DOUBLE_EQ(time.step_s, 15 + 6 + 5 + 12);
  expect_parts(time.ranks.at(0), 21, 5, 12, 0);
}

TEST(TimeSimulation, CommunicationTakesPartOfTheDeviceFromKernels) {
  Machine machine = machine_of(2);
  machine.inside_host.occupancy = 0.25;
  const auto time = [&](int64_t covering) {
    return time_of(machine, [&](int64_t, Writer& writer) {
      const uint32_t operation = writer.start(0, {.kind = Kind::all_reduce}, 6);  // 12 s
      writer.kernel(covering);
      writer.wait(operation);
      writer.kernel(4);
    });
  };
  const StepTime partly = time(8);  // 8 + 2, two more seconds of waiting, 4
  EXPECT_DOUBLE_EQ(partly.step_s, 16);
  expect_parts(partly.ranks.at(0), 14, 0, 2, 0);
  const StepTime covered = time(20);  // 20 + 3, 4
  EXPECT_DOUBLE_EQ(covered.step_s, 27);
  expect_parts(covered.ranks.at(0), 27, 0, 0, 0);
}

TEST(TimeSimulation, WhatAHostWaitsForOtherRanksIsNoWork) {
  Machine machine = machine_of(2);
  machine.launch_s = 1;
  // The hosts meet outside the device, for 4 s.
  const StepTime time = time_of(machine, [](int64_t rank, Writer& writer) {
    writer.host_wait(100);  // for the kernel before
    writer.kernel(rank == 0 ? 3 : 10);
    writer.host_wait(100);
    writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 2, /*on_device=*/false));
    writer.kernel(5);
  });
  // Launch 1, kernel 10, launch 1, transfer 4, launch 1, kernel 5.
  EXPECT_DOUBLE_EQ(time.step_s, 22);
  expect_parts(time.ranks.at(0), 1 + 3 + 1 + 5, 0, 4, 8);
  expect_parts(time.ranks.at(1), 1 + 10 + 1 + 5, 0, 4, 1);
}

TEST(TimeSimulation, OnlyKernelsThatRunAreSlowedByCommunication) {
  Machine machine = machine_of(2);
  machine.inside_host.occupancy = 0.25;
  const StepTime time = time_of(machine, [](int64_t, Writer& writer) {
    const uint32_t covered = writer.start(0, {.kind = Kind::all_reduce}, 12);  // 24 s
    writer.kernel(2);
    writer.wait(writer.start(1, {.kind = Kind::all_reduce}, 3));  // waits from 2 to 8
    writer.kernel(4);
    writer.wait(covered);  // of the first 12 s kernels ran 6, which take 1.5 more
    writer.kernel(1);
  });
  EXPECT_DOUBLE_EQ(time.ranks.at(0).compute_s, 2 + 4 + 1.5 + 1);
}

TEST(TimeSimulation, WhatSlowsBackwardIsNotTheOptimizers) {
  Machine machine = machine_of(2);
  machine.inside_host.occupancy = 0.5;
  const StepTime time = time_of(machine, [](int64_t, Writer& writer) {
    const uint32_t covered = writer.start(0, {.kind = Kind::all_reduce}, 2);  // 4 s
    writer.kernel(8);
    writer.wait(covered);
    writer.kernel(1, /*backward=*/false);
  });
  expect_parts(time.ranks.at(0), 8 + 2, 1, 0, 0);
}

TEST(TimeSimulation, AMeasuredMessageTakesWhatWasMeasured) {
  Machine machine = machine_of(2, /*latency=*/50);
  machine.inside_host.collectives = {{.name = "send", .points = {{1, 1}, {1e6, 1e6}}}};
  const StepTime time = time_of(machine, [](int64_t rank, Writer& writer) {
    const auto kind = rank == 0 ? Kind::send : Kind::receive;
    writer.kernel(1);
    writer.wait(writer.start(0, {.kind = kind, .position = 1 - rank}, 3));
    writer.kernel(2, false);
  });
  EXPECT_DOUBLE_EQ(time.step_s, 1 + 3 + 2);
}

TEST(TimeSimulation, FasterMachinesTakeNoLonger) {
  const auto step = [](int64_t rank, Writer& writer) {
    const uint32_t first = writer.start(0, {.kind = Kind::all_reduce}, 3);
    writer.kernel(5 + 4 * rank, true, 12);
    writer.wait(first);
    writer.wait(writer.start(0, {.kind = Kind::all_gather}, 2));
    writer.kernel(2, false);
  };
  Machine machine = machine_of(2, /*latency=*/1);
  machine.launch_s = 2;
  machine.inside_host.occupancy = 0.5;
  const double base = time_of(machine, step).step_s;
  const auto faster = [&](auto&& change) {
    Machine other = machine;
    change(other);
    return time_of(other, step).step_s;
  };
  EXPECT_LT(faster([](Machine& m) { m.memory_bytes_per_s *= 2; }), base);
  EXPECT_LT(faster([](Machine& m) { m.wide_flops_per_s *= 2; }), base);
  EXPECT_LT(faster([](Machine& m) { m.inside_host.bytes_per_s *= 2; }), base);
  EXPECT_LT(faster([](Machine& m) { m.inside_host.latency_s = 0; }), base);
  EXPECT_LE(faster([](Machine& m) { m.launch_s = 0; }), base);
  EXPECT_LT(faster([](Machine& m) { m.inside_host.occupancy = 0; }), base);
}

TEST(TimeSimulation, ARingBetweenHostsUsesTheAdaptersOfAHost) {
  const RankList ranks = {0, 1, 2, 3};
  const ProgramCall call{.operation = {.kind = Kind::all_reduce}, .numel = 8, .bytes = 8};
  EXPECT_DOUBLE_EQ(machine_of(4).transfer(call, ranks, 0).seconds, 12 * 2.0);
  EXPECT_DOUBLE_EQ(machine_of(1).transfer(call, ranks, 0).seconds, 12 * 3.0);
  // Two adapters are faster than the links inside the host, so these links count.
  EXPECT_DOUBLE_EQ(machine_of(2).transfer(call, ranks, 0).seconds, 12 * 2.0);
  const ProgramCall message{
      .operation = {.kind = Kind::send, .position = 1}, .numel = 8, .bytes = 8};
  EXPECT_DOUBLE_EQ(machine_of(2).transfer(message, ranks, 0).seconds, 16);
  EXPECT_DOUBLE_EQ(machine_of(1).transfer(message, ranks, 0).seconds, 24);
}

/// A job in which the ranks of a stage share the program of the first one: two equal steps in a
/// group of `kind`.
JobProgram job_of_stages(const ParallelSizes& sizes, GroupKind kind,
                         const std::function<void(int64_t stage, Writer&)>& step) {
  JobProgram job{.programs = {}, .program_of = {}, .grids = RankGrids(sizes)};
  const RankGroups stages = job.grids->groups(GroupKind::pp);
  for (int64_t rank = 0; rank < sizes.world_size; ++rank) {
    const int64_t stage = *stages.position_of(rank);
    job.program_of.push_back(static_cast<uint32_t>(stage));
    if (stage < static_cast<int64_t>(job.programs.size())) continue;
    Writer writer(rank);
    writer.group(to_string(kind), job.grids->group_of(kind, rank));
    for (int i = 0; i < 2; ++i) {
      step(stage, writer);
      writer.end_step();
    }
    job.programs.push_back(writer.take());
  }
  return job;
}

/// The seconds that an operation of 6 bytes adds to a step in which all ranks share a program.
double seconds_of(const ParallelSizes& sizes, const CollectiveOperation& operation,
                  int64_t ranks_per_host) {
  const JobProgram job = job_of_stages(sizes, GroupKind::tp, [&](int64_t, Writer& writer) {
    writer.kernel(1);
    writer.wait(writer.start(0, operation, 6));
  });
  return simulate_step(job, machine_of(ranks_per_host)).step_s - 1;
}

TEST(TimeSimulation, TheGroupThatLiesWorstOnTheHostsDecides) {
  // Rank 0 passes on to a rank of its host, rank 1 does not.
  const ParallelSizes four = {.world_size = 4, .tensor = 4};
  const CollectiveOperation next = {.kind = Kind::exchange, .position = 1, .source = 3};
  EXPECT_DOUBLE_EQ(seconds_of(four, next, 4), 12);
  EXPECT_DOUBLE_EQ(seconds_of(four, next, 2), 18);
  // Rank 0 passes on to another host, like all ranks.
  EXPECT_DOUBLE_EQ(seconds_of(four, {.kind = Kind::exchange, .position = 2, .source = 2}, 2), 18);
  // Ranks 0 to 2 are on one host, and ranks 3 to 5 on two: each sends 8 bytes.
  const ParallelSizes six = {.world_size = 6, .tensor = 3};
  EXPECT_DOUBLE_EQ(seconds_of(six, {.kind = Kind::all_reduce}, 3), 16);
  EXPECT_DOUBLE_EQ(seconds_of(six, {.kind = Kind::all_reduce}, 4), 24);
  // Rank 0 sends to rank 2 on its host, rank 1 to rank 3 on the next one.
  const JobProgram messages = job_of_stages(
      {.world_size = 4, .pipeline = 2}, GroupKind::pp, [](int64_t stage, Writer& writer) {
        writer.kernel(1);
        if (stage == 0) writer.wait(writer.start(0, {.kind = Kind::send, .position = 1}, 6));
        if (stage == 1) writer.wait(writer.start(0, {.kind = Kind::receive, .position = 0}, 6));
      });
  EXPECT_DOUBLE_EQ(simulate_step(messages, machine_of(4)).step_s, 1 + 12);
  EXPECT_DOUBLE_EQ(simulate_step(messages, machine_of(3)).step_s, 1 + 18);
}

/// The pipeline's own simulation, in which messages take `transfer`, is the oracle.
void expect_as_simulated(const ScheduleOptions& options, int64_t transfer) {
  const PipelineSchedule schedule = make_schedule(options);
  const TaskCost cost = reference_cost(schedule);
  const auto makespan = static_cast<double>(simulate(schedule, cost, transfer).makespan());
  const StepLists steps = communication_steps(schedule);
  RankList all;
  for (int64_t rank = 0; rank < options.pipeline; ++rank) all.push_back(rank);
  const JobProgram job = job_of(
      options.pipeline,
      [&](int64_t, Writer& writer) {
        writer.group("pp", all);
        writer.group("all", all);
      },
      [&](int64_t rank, Writer& writer) {
        const auto& own = steps[static_cast<size_t>(rank)];
        std::map<size_t, uint32_t> started;
        const auto early = early_receives(steps, rank);
        for (size_t i = 0; i < own.size(); ++i) {
          for (const size_t receive : early[i])
            started[receive] =
                writer.start(0, {.kind = Kind::receive, .position = own[receive].peer}, transfer);
          if (own[i].kind == PipelineStep::Kind::compute)
            writer.kernel(cost(rank, own[i].task));
          else if (own[i].kind == PipelineStep::Kind::send)
            writer.start(0, {.kind = Kind::send, .position = own[i].peer}, transfer);
          else
            writer.wait(started.at(i));
        }
        writer.wait(writer.start(1, {.kind = Kind::all_reduce}, 0));  // ends the step of all ranks
      });
  Machine machine = machine_of(options.pipeline);
  machine.inside_host.bytes_per_s = 1;
  const StepTime time = simulate_step(job, machine);
  EXPECT_NEAR(time.step_s, makespan, 1e-9 * makespan)
      << to_string(options.family) << " " << options.pipeline << " x " << options.virtual_pipeline
      << ", " << options.microbatches << " micro-batches, transfer " << transfer;
  const double fraction = simulate(schedule, cost, transfer).bubble_fraction();
  EXPECT_NEAR((time.bubble_s() + time.exposed_s()) / time.step_s, fraction, 1e-9);
}

TEST(TimeSimulation, PipelinesTakeAsLongAsTheirScheduleSays) {
  for (const int64_t ranks : {1, 2, 3, 4, 8})
    for (const int64_t microbatches : {1, 2, 5, 8, 16})
      for (const auto family :
           {ScheduleFamily::one_f_one_b, ScheduleFamily::gpipe, ScheduleFamily::zb_h1})
        expect_as_simulated({.pipeline = ranks, .microbatches = microbatches, .family = family}, 0);
  for (const int64_t chunks : {2, 3})
    expect_as_simulated({.pipeline = 4, .virtual_pipeline = chunks, .microbatches = 8}, 0);
}

TEST(TimeSimulation, MessagesThatTakeTimeDelayAPipelineAsMuchAsItsScheduleSays) {
  for (const int64_t microbatches : {1, 4, 9})
    expect_as_simulated(
        {.pipeline = 4, .microbatches = microbatches, .family = ScheduleFamily::gpipe}, 1);
  expect_as_simulated({.pipeline = 2, .microbatches = 1}, 1);
  expect_as_simulated({.pipeline = 4, .microbatches = 1}, 1);
}

TEST(TimeSimulation, ProgramsThatCannotBeTimedAreRefused) {
  JobProgram one_step = job_of(
      1, [](int64_t, Writer&) {}, [](int64_t, Writer& writer) { writer.kernel(1); });
  one_step.programs[0].step_ends.pop_back();
  EXPECT_THROW(simulate_step(one_step, machine_of(1)), UsageError);
  const JobProgram stuck = job_of(
      2,
      [](int64_t, Writer& writer) {
        writer.group("a", {0, 1});
        writer.group("b", {0, 1});
      },
      [](int64_t rank, Writer& writer) {
        writer.kernel(1);
        for (const uint32_t group : {rank == 0 ? 0U : 1U, rank == 0 ? 1U : 0U})
          writer.wait(writer.start(group, {.kind = Kind::all_reduce}, 4));
      });
  EXPECT_THROW(simulate_step(stuck, machine_of(1)), UsageError);
}

}  // namespace
}  // namespace lockstep
