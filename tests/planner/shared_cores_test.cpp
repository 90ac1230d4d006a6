// Ranks that share the cores of their host. Programs are written by hand.

#include "lockstep/planner/shared_cores.h"

#include <gtest/gtest.h>

#include <random>

#include "lockstep/core/error.h"
#include "lockstep/tests/planner/written_programs.h"
#include "lockstep/tests/support/throws_with.h"

namespace lockstep {
namespace {

using namespace testing;

using Kind = CollectiveOperation::Kind;
using Step = std::function<void(int64_t rank, Writer& writer)>;

/// A byte of a kernel takes 1 s of a core, a byte to another rank 2 s of a core on each rank.
Machine host_of(int64_t ranks, int64_t cores) {
  Machine machine = machine_of(ranks);
  machine.synchronous = true;
  machine.cores = cores;
  return machine;
}

/// All ranks are in group 0.
JobProgram program_of(int64_t ranks, const Step& step) {
  RankList all;
  for (int64_t rank = 0; rank < ranks; ++rank) all.push_back(rank);
  return job_of(
      ranks, [&](int64_t, Writer& writer) { writer.group("all", all); }, step);
}

void meet(Writer& writer) { writer.wait(writer.start(0, {.kind = Kind::all_reduce}, 0)); }

TEST(SharedCores, KernelsThatRunTogetherShareThem) {
  const auto seconds = [](int64_t ranks, int64_t cores) {
    return simulate_step(program_of(ranks,
                                    [](int64_t rank, Writer& writer) {
                                      writer.kernel(rank == 0 ? 6 : 2);
                                      meet(writer);
                                    }),
                         host_of(ranks, cores))
        .step_s;
  };
  EXPECT_DOUBLE_EQ(seconds(2, 1), 2 * 2 + 4);
  // Three others work 2 s on half a core each, and then rank 0 has one alone.
  EXPECT_DOUBLE_EQ(seconds(4, 2), 4 + 4);
  EXPECT_DOUBLE_EQ(seconds(4, 3), 2 * 4.0 / 3 + 4);
}

TEST(SharedCores, ABubbleOfOneRankIsAnotherOnesTime) {
  // Rank 1 has nothing to do until rank 0 has sent, and rank 0 afterwards.
  const JobProgram job = program_of(2, [](int64_t rank, Writer& writer) {
    if (rank == 0) {
      writer.kernel(8);
      writer.wait(writer.start(0, {.kind = Kind::send, .position = 1}, 3));
    } else {
      writer.wait(writer.start(0, {.kind = Kind::receive, .position = 0}, 3));
      writer.kernel(5);
    }
    meet(writer);
  });
  const StepTime shared = simulate_step(job, host_of(2, 1));
  // The message takes 6 s of a core on both ranks, which have one.
  EXPECT_DOUBLE_EQ(shared.step_s, 8 + 12 + 5);
  EXPECT_DOUBLE_EQ(shared.ranks.at(0).compute_s, 8);
  EXPECT_DOUBLE_EQ(shared.ranks.at(0).exposed_total_s(), 12);
  EXPECT_DOUBLE_EQ(shared.ranks.at(0).bubble_s, 5);
  EXPECT_DOUBLE_EQ(shared.ranks.at(1).bubble_s, 8);
}

TEST(SharedCores, AnOperationInTheBackgroundTakesItsOccupancy) {
  Machine machine = host_of(3, 2);
  machine.inside_host.occupancy = 0.5;
  const JobProgram job = program_of(3, [](int64_t, Writer& writer) {
    const uint32_t started = writer.start(0, {.kind = Kind::all_reduce}, 3);
    writer.kernel(90);
    writer.wait(started);
    meet(writer);
  });
  // 4 bytes a rank: 8 s at a share of 2 / 4.5 while all three compute, which then have 2 / 3.
  const double meanwhile = 8 * 4.5 / 2;
  EXPECT_NEAR(simulate_step(job, machine).step_s, meanwhile + (90 - 8) * 1.5, 1e-9);
}

TEST(SharedCores, WhatNobodyWaitsForDoesNotLengthenTheStep) {
  const JobProgram job = program_of(2, [](int64_t, Writer& writer) {
    writer.kernel(4);
    meet(writer);
    writer.start(0, {.kind = Kind::all_reduce}, 100);
  });
  // That of the step before comes first on the stream. It takes 200 s, of which 4 pass while both
  // kernels have half of the core for 8 s.
  EXPECT_DOUBLE_EQ(simulate_step(job, host_of(2, 1)).step_s, 8 + 196);
}

TEST(SharedCores, JobsOfSeveralHostsAreRefused) {
  const JobProgram job = program_of(4, [](int64_t, Writer& writer) { writer.kernel(1); });
  EXPECT_TRUE(throws_with<ConfigError>([&] { simulate_step(job, host_of(3, 2)); },
                                       "found 4 ranks, allowed: 1 to 3, ranks_per_host"));
}

/// Random kernels, collectives that kernels cover or not, and messages.
JobProgram random_job(std::mt19937& random, int64_t ranks) {
  const auto draw = [&](int64_t least, int64_t most) {
    return std::uniform_int_distribution<int64_t>(least, most)(random);
  };
  std::vector<std::vector<int64_t>> bytes(static_cast<size_t>(ranks));
  const int64_t rounds = draw(1, 6), covered = draw(0, 40), from = draw(0, ranks - 1);
  for (auto& own : bytes)
    for (int64_t i = 0; i < 2 * rounds; ++i) own.push_back(draw(0, 20));
  return program_of(ranks, [=](int64_t rank, Writer& writer) {
    for (int64_t i = 0; i < rounds; ++i) {
      writer.kernel(bytes[static_cast<size_t>(rank)][static_cast<size_t>(2 * i)]);
      const uint32_t started = writer.start(0, {.kind = Kind::all_reduce}, covered);
      writer.kernel(bytes[static_cast<size_t>(rank)][static_cast<size_t>(2 * i + 1)], i % 2 == 0);
      writer.wait(started);
      const int64_t to = (from + 1) % ranks;
      if (rank == from)
        writer.wait(writer.start(0, {.kind = Kind::send, .position = to}, covered));
      else if (rank == to)
        writer.wait(writer.start(0, {.kind = Kind::receive, .position = from}, covered));
    }
    meet(writer);
  });
}

TEST(SharedCores, EnoughCoresAreAsGoodAsDevices) {
  std::mt19937 random(1);
  for (int i = 0; i < 200; ++i) {
    const int64_t ranks = 2 + i % 4;
    const JobProgram job = random_job(random, ranks);
    Machine machine = host_of(ranks, 0);
    machine.launch_s = 0.25 * (i % 3);
    const StepTime devices = simulate_step(job, machine);
    machine.cores = ranks;
    const StepTime shared = simulate_shared_cores(job, machine);
    ASSERT_NEAR(shared.step_s, devices.step_s, 1e-9) << i;
    for (size_t rank = 0; rank < devices.ranks.size(); ++rank) {
      const RankTime &one = shared.ranks.at(rank), &other = devices.ranks.at(rank);
      ASSERT_NEAR(one.compute_s, other.compute_s, 1e-9) << i;
      ASSERT_NEAR(one.optimizer_s, other.optimizer_s, 1e-9) << i;
      ASSERT_NEAR(one.exposed_total_s(), other.exposed_total_s(), 1e-9) << i;
      ASSERT_NEAR(one.bubble_s, other.bubble_s, 1e-9) << i;
      ASSERT_EQ(one.num_ranks, other.num_ranks) << i;
    }
  }
}

TEST(SharedCores, TheStepLiesBetweenWhatTheWorkNeedsAndEqualShares) {
  std::mt19937 random(2);
  for (int i = 0; i < 100; ++i) {
    const int64_t ranks = 2 + i % 4;
    const JobProgram job = random_job(random, ranks);
    const StepTime devices = simulate_step(job, host_of(ranks, 0));
    const double work = static_cast<double>(ranks) * (devices.compute_s() + devices.optimizer_s());
    for (int64_t cores = 1; cores < ranks; ++cores) {
      const double seconds = simulate_step(job, host_of(ranks, cores)).step_s;
      const auto ranks_of_a_core = static_cast<double>(ranks) / static_cast<double>(cores);
      ASSERT_GE(seconds, std::max(devices.step_s, work / static_cast<double>(cores)) - 1e-9) << i;
      ASSERT_LE(seconds, ranks_of_a_core * devices.step_s + 1e-9) << i;
    }
  }
}

}  // namespace
}  // namespace lockstep
