#include "lockstep/planner/link_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>

#include "lockstep/core/error.h"

namespace lockstep {
namespace {

using Kind = CollectiveOperation::Kind;

/// A hand-written step of one rank.
class Step {
 public:
  explicit Step(int64_t rank) { program_.rank = rank; }

  uint32_t group(const std::string& name, RankList ranks) {
    const auto own = std::find(ranks.begin(), ranks.end(), program_.rank) - ranks.begin();
    program_.groups.push_back({name, "", std::move(ranks), own});
    return static_cast<uint32_t>(program_.groups.size()) - 1;
  }
  void start(uint32_t group, const CollectiveOperation& operation, int64_t bytes) {
    program_.calls.push_back({group, operation, "x", "Float", bytes / 4, bytes, true});
    program_.events.push_back(
        {ProgramEvent::Kind::start, static_cast<uint32_t>(program_.calls.size()) - 1});
  }
  void end() { program_.step_ends.push_back(program_.events.size()); }
  RankProgram take() { return std::move(program_); }

 private:
  RankProgram program_;
};

JobProgram job_of(int64_t world, const std::function<void(int64_t rank, Step& step)>& write) {
  JobProgram job;
  for (int64_t rank = 0; rank < world; ++rank) {
    Step step(rank);
    write(rank, step);
    step.end();
    job.programs.push_back(step.take());
    job.program_of.push_back(static_cast<uint32_t>(rank));
  }
  return job;
}

/// Links used when each of four ranks starts `operation` with `bytes` in one group of all.
LinkUse use_of(const CollectiveOperation& operation, int64_t bytes, int64_t ranks_per_host) {
  const LinkPlan plan =
      plan_links(job_of(4,
                        [&](int64_t, Step& step) {
                          step.start(step.group("dp", {0, 1, 2, 3}), operation, bytes);
                        }),
                 ranks_per_host);
  EXPECT_EQ(plan.groups.size(), 1u);
  EXPECT_EQ(plan.groups[0].group, "dp");
  EXPECT_EQ(plan.groups[0].ranks, 4);
  EXPECT_EQ(plan.groups[0].operations, 4);
  return plan.groups[0];
}

void expect_bytes(const LinkUse& use, int64_t inside, int64_t between, int64_t of_a_rank) {
  EXPECT_EQ(use.inside_bytes, inside);
  EXPECT_EQ(use.between_bytes, between);
  EXPECT_EQ(use.most_of_a_rank, of_a_rank);
}

TEST(LinkPlan, CollectivesCountAsInARing) {
  // Four ranks on two hosts: two of the ring's four edges cross.
  expect_bytes(use_of({.kind = Kind::all_reduce}, 400, 2), 1200, 1200, 600);
  expect_bytes(use_of({.kind = Kind::reduce_scatter}, 400, 2), 600, 600, 300);
  expect_bytes(use_of({.kind = Kind::all_gather}, 100, 2), 600, 600, 300);
  expect_bytes(use_of({.kind = Kind::all_reduce}, 400, 4), 2400, 0, 600);
  expect_bytes(use_of({.kind = Kind::all_reduce}, 400, 1), 0, 2400, 600);
  // Three and one: the edges 2 -> 3 and 3 -> 0.
  expect_bytes(use_of({.kind = Kind::all_reduce}, 400, 3), 1200, 1200, 600);
}

TEST(LinkPlan, ABroadcastPassesThreeTimes) {
  expect_bytes(use_of({.kind = Kind::broadcast, .position = 0}, 100, 2), 200, 100, 100);
  expect_bytes(use_of({.kind = Kind::broadcast, .position = 3}, 100, 2), 100, 200, 100);
  expect_bytes(use_of({.kind = Kind::broadcast, .position = 1}, 100, 2), 100, 200, 100);
}

TEST(LinkPlan, AnAllToAllSendsEqualParts) {
  expect_bytes(use_of({.kind = Kind::all_to_all}, 400, 2), 400, 800, 300);
}

TEST(LinkPlan, ComparisonsCountNothing) {
  const LinkPlan plan =
      plan_links(job_of(2,
                        [](int64_t, Step& step) {
                          step.start(step.group("world", {0, 1}), {.kind = Kind::comparison}, 8);
                        }),
                 1);
  EXPECT_TRUE(plan.groups.empty());
}

TEST(LinkPlan, MessagesGoToTheirRank) {
  const LinkPlan plan =
      plan_links(job_of(4,
                        [](int64_t rank, Step& step) {
                          const uint32_t pp = step.group("pp", {0, 1, 2, 3});
                          if (rank < 3)
                            step.start(pp, {.kind = Kind::send, .position = rank + 1}, 100);
                          if (rank > 0)
                            step.start(pp, {.kind = Kind::receive, .position = rank - 1}, 100);
                        }),
                 2);
  ASSERT_EQ(plan.groups.size(), 1u);
  expect_bytes(plan.groups[0], 200, 100, 100);
  EXPECT_EQ(plan.groups[0].operations, 6);
  EXPECT_EQ(plan.hosts, 2);
}

TEST(LinkPlan, TheLastStepCounts) {
  const JobProgram job = job_of(2, [](int64_t, Step& step) {
    const uint32_t dp = step.group("dp", {0, 1});
    step.start(dp, {.kind = Kind::all_reduce}, 4000);
    step.end();
    step.start(dp, {.kind = Kind::all_reduce}, 40);
  });
  expect_bytes(plan_links(job, 1).groups.at(0), 0, 80, 40);
}

TEST(LinkPlan, RanksThatShareAProgramUseTheirOwnGroups) {
  JobProgram job = job_of(1, [](int64_t, Step& step) {
    step.start(step.group("tp", {0, 1}), {.kind = Kind::all_reduce}, 100);
    step.start(step.group("dp", {0, 2}), {.kind = Kind::all_gather}, 10);
  });
  job.program_of = {0, 0, 0, 0};
  job.grids.emplace(ParallelSizes{.world_size = 4, .tensor = 2});
  const LinkPlan plan = plan_links(job, 2);
  ASSERT_EQ(plan.groups.size(), 2u);
  EXPECT_EQ(plan.groups[0].group, "dp");
  expect_bytes(plan.groups[0], 0, 40, 10);
  expect_bytes(plan.groups[1], 400, 0, 100);
  EXPECT_EQ(plan.inside_bytes(), 400);
  EXPECT_EQ(plan.between_bytes(), 40);
}

TEST(LinkPlan, WhatCannotBeCountedIsRefused) {
  JobProgram job = job_of(2, [](int64_t, Step& step) { step.group("dp", {0, 1}); });
  EXPECT_THROW(plan_links(job, 0), ConfigError);
  job.programs[1].step_ends.clear();
  EXPECT_THROW(plan_links(job, 1), UsageError);
}

}  // namespace
}  // namespace lockstep
